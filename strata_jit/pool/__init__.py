"""Node processes, the memory they share, and the steps that their threads run. Knows no model."""
