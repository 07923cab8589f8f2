"""How text is cut into words before byte pairs are merged: one set of rules per `tokenizer.ggml.pre`.

Owns the table of known names and the rules behind each; knows no vocabulary. A rule is a list of regular
expressions applied in order, each cutting out its matches from the pieces that the ones before left (what
does not match stays a piece). The expressions are those of the models' own `tokenizer.json`; the grouping of
names, and which models take a whole word that is a token without merging, are those of llama.cpp's
llama-vocab.cpp. A GGUF file does not record a Unicode normalisation, so none is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules of one kind of vocabulary.

    `splits` are regular expressions (Oniguruma's syntax, the engine of the `tokenizers` library). With
    `whole_words`, a word that is a token itself is taken as it is, whatever its merges would give. `add_bos`
    is what holds where a file has no `tokenizer.ggml.add_bos_token`. Words are spelt in GPT-2's 256 byte
    letters, unless `raw`: then spaces become U+2581, words are spelt as they are, and a character that is no
    token is spelt in byte tokens.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    raw: bool = False


# "don't" -> "don", "'t"
_SUFFIX = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_SUFFIX = f"(?i:{_SUFFIX})"
_SPACES = r"\s+(?!\S)|\s+"
_LINES_AND_SPACES = rf"\s*[\r\n]+|{_SPACES}"

_GPT2 = rf"{_SUFFIX}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"

# cl100k and its kin differ in how many digits make a word
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CL100K = rf"{_ANY_CASE_SUFFIX}|{_WORD}|{_THREE_DIGITS}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_QWEN2 = rf"{_ANY_CASE_SUFFIX}|{_WORD}|{_DIGIT}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_ANY_CASE_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_SEED_CODER = rf"{_ANY_CASE_SUFFIX}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_ANY_CASE_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
)


_UFAKZEKA = rf"{_WORD}|{_DIGIT}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_MINICPM5 = rf"{_ANY_CASE_SUFFIX}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_LINES_AND_SPACES}"
_RUNS_OF_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in "512 256 128 64 32 16 8 4 1,2".split())
_JAIS2 = rf"{_ANY_CASE_SUFFIX}|{_WORD}|{_THREE_DIGITS}|{_SYMBOLS}|\s*[\r\n]+|{_RUNS_OF_SPACES}|\s"


def _cased(suffix: str, digits: str, upper: str, lower: str, line_marks: str = r"\r\n/") -> str:
    """o200k and its kin: a word ends where upper case follows lower case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{line_marks}]*|{_LINES_AND_SPACES}"
    )


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = _cased(f"{_ANY_CASE_SUFFIX}?", _THREE_DIGITS, _UPPER, _LOWER)
_TEKKEN = _cased("", _DIGIT, _UPPER, _LOWER)
_KIMI = r"\p{Han}+|" + _cased(
    f"{_ANY_CASE_SUFFIX}?",
    _THREE_DIGITS,
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    line_marks=r"\r\n",
)

_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_YOUTU = _cased(f"{_ANY_CASE_SUFFIX}?", _DIGIT, _UPPER, _LOWER)

_NEWLINE = r"[\r\n]"
_LINES = r"[^\n]+|\n+"
_DIGITS_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE_SCRIPTS = (
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟"
    "เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
)
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_CJK_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_MARKED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_SPARK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+|{_NEWLINE}|{_SPACES}"
)
# the cased letters of Unicode, as the model's own file lists them (escaped: some are not in NFC)
_CASED_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}"
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}"
    r"\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}"
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}"
    r"\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}"
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}"
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)

_DIGITS_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((_CL100K,), whole_words=True, add_bos=True)
_DEEPSEEK_V3 = PreTokenizer((_THREE_DIGITS, _CJK_AND_KANA, _MARKED_WORDS))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"[\t\n]|    |  ",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_BY_RULES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _DEFAULT),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _DIGITS_GPT2),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert "
        "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
        _PLAIN_GPT2,
    ),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_CL100K,))),
    ("glm4 glm5", PreTokenizer((_CL100K,), whole_words=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("gpt-4o llama4 kanana2 minimax-m2 talkie", PreTokenizer((_O200K,))),
    ("granite-embed-multi-97m", PreTokenizer((_O200K,), whole_words=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    ("youtu", PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), whole_words=True)),
    ("tekken", PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True)),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
    ("deepseek-coder", PreTokenizer((_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, _DIGIT))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                _NEWLINE,
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _CJK_AND_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("afmoe", PreTokenizer((_DIGITS_FROM_RIGHT, _AFMOE_SCRIPTS, _MARKED_WORDS))),
    ("spark2_5", PreTokenizer((_THREE_DIGITS, _CJK_AND_KANA, _SPARK, _DIGIT))),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    ("minicpm5", PreTokenizer((_THREE_DIGITS, _MINICPM5), whole_words=True)),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("ufakzeka", PreTokenizer((_UFAKZEKA,))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("chameleon", PreTokenizer(_CHAMELEON, add_bos=True)),
    ("gemma4 granite-embed-multi-311m sarvam-moe", PreTokenizer((_LINES,), raw=True)),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rules for names, rules in _BY_RULES for name in names.split()
}
"""All that are known, by their name in `tokenizer.ggml.pre`."""


def word_splitter(rules: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The rules as an object of the `tokenizers` library; words are spelt in byte letters unless `raw`."""
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rules.splits
    ]
    if not rules.raw:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(cuts)
