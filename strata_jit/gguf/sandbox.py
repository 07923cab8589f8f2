"""Rendering a Jinja template that comes from a stranger: no side effects, bounded time and size.

Owns the places where a rendering is counted; knows nothing of chats. Jinja's immutable sandbox keeps a
template from Python's internals, from files and from changing what it is given; here every loop iteration,
call and growing operation is counted too, before it is done, and every list or dict when it is made. A
template within the bounds renders as in Jinja's own sandbox.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from strata_jit.gguf.limits import (
    MAX_SOURCE_LENGTH,
    Bounds,
    Budget,
    LimitError,
    check_characters,
    check_percent_format,
    check_widths,
)

# filters that stand in for what cannot be intercepted
_COUNTED = "strata_counted"
_CONCATENATED = "strata_concatenated"
_WEIGHED = "strata_weighed"
# filters for web pages, whose time grows faster than their input: no chat template needs them
_OF_WEB_PAGES = ("urlize", "striptags", "xmlattr")
# filters whose result can be longer than their input by their other arguments
_WIDENING = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")

Filter = Callable[..., Any]


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox within `Bounds`; one object renders one template at a time."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, bounds: Bounds, filters: Mapping[str, Filter], **options: Any) -> None:
        """`filters` come besides Jinja's own; `options` are those of Jinja's `Environment`."""
        self._budget = Budget(bounds)
        # unoptimised, so that as little as possible is computed while compiling
        super().__init__(optimized=False, cache_size=0, auto_reload=False, **options)
        del self.globals["lipsum"]  # random text of any length
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _DictMaker(self._counted)
        self.filters.update(filters)
        for name in _OF_WEB_PAGES:
            del self.filters[name]
        for name in _WIDENING:
            self.filters[name] = _checked_widening(self._budget, self.filters[name])
        self.filters["replace"] = _checked_replace(self._budget, self.filters["replace"])
        self.filters["join"] = _checked_join(self._budget, self.filters["join"])
        self.filters["trim"] = _checked_trim(self.filters["trim"])
        self.filters["unique"] = _checked_unique(self._counted, self.filters["unique"])
        self.filters["sum"] = _checked_sum(self._budget, self.filters["sum"])
        self.filters["format"] = _checked_format(self.filters["format"])
        self.filters = {name: self._weighed_filter(function) for name, function in self.filters.items()}
        self.tests = {name: self._stepped(function) for name, function in self.tests.items()}
        self.filters[_COUNTED] = self._counted
        self.filters[_CONCATENATED] = self._concatenated
        self.filters[_WEIGHED] = self._weighed

    def render_bounded(self, source: str, variables: Mapping[str, Any]) -> str:
        """The rendered template. Raises `LimitError`, and whatever else the template leads to."""
        if len(source) > MAX_SOURCE_LENGTH:
            raise LimitError(f"it is longer than {MAX_SOURCE_LENGTH} characters")
        self._budget.refill()
        return self.from_string(source).render(variables)

    def concat(self, parts: Iterable[str]) -> str:  # an attribute in Jinja
        """Join the pieces of an output: the template's, a macro's, a block's."""
        return "".join(self._budget.parts(parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` unless the result is too large."""
        self._budget.step()
        self._budget.operation(operator, left, right)
        return self._weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, function or method unless the result is too large."""
        __self._budget.step()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            args = __self._budget.method(owner, method.__name__, args, kwargs)
        __self._budget.weigh_together((*args, *kwargs.values()))  # a macro may keep them as a tuple
        return __self._weighed(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._budget.step()
            yield self._weighed(value)

    def _weighed(self, value: Any) -> Any:
        self._budget.weigh(value)
        return value

    def _weighed_filter(self, function: Filter) -> Filter:
        @functools.wraps(function)  # keeps Jinja's marks on the function too
        def weighed(*args: Any, **kwargs: Any) -> Any:
            self._budget.step()
            return self._weighed(function(*args, **kwargs))

        return weighed

    def _stepped(self, function: Any) -> Filter:
        """A test, which a filter such as `select` may run for every item."""

        @functools.wraps(function)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._budget.step()
            return function(*args, **kwargs)

        return stepped

    def _concatenated(self, values: list[Any]) -> str:
        return "".join(self._budget.parts(map(str, values)))


class _Namespace(Namespace):
    """Jinja's `namespace`, which may hold itself; printing one shows no more than that it is one."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _DictMaker:
    """Python's `dict` as templates call it, pair by pair: keys can be chosen to take long in the table."""

    __slots__ = ("_counted",)

    def __init__(self, counted: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        self._counted = counted

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if len(args) == 1 and not isinstance(args[0], Mapping):
            args = (self._counted(args[0]),)
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(self._counted(keys), value)


class _Counting(NodeTransformer):
    """Has loop iterations counted, the results of `~` bounded and literal containers weighed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATED)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _WEIGHED)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _WEIGHED)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _WEIGHED) if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _checked_widening(budget: Budget, function: Filter) -> Filter:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *others = _values(function, args, kwargs)
        check_widths(others)
        widths = [len(other) if isinstance(other, str) else other for other in others]
        factor = max((width for width in widths if isinstance(width, int)), default=0)
        if isinstance(value, str):
            places = len(value) if function.__name__ == "do_wordwrap" else value.count("\n") + 1
            budget.length(len(value) + places * max(factor, 0))
        return function(*args, **kwargs)

    return checked


def _checked_replace(budget: Budget, function: Filter) -> Filter:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = _values(function, args, kwargs)
        if len(values) > 2:
            budget.replacement(*(str(value) for value in values[:3]))
        return function(*args, **kwargs)

    return checked


def _checked_join(budget: Budget, function: Filter) -> Filter:
    @functools.wraps(function)
    def checked(eval_context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        if attribute is not None:
            value = map(make_attrgetter(eval_context.environment, attribute), value)
        return function(eval_context, list(budget.parts(map(_text, value), len(str(d)))), d)

    return checked


def _checked_trim(function: Filter) -> Filter:
    @functools.wraps(function)
    def checked(value: Any, chars: Any = None) -> Any:
        check_characters((chars,))
        return function(value, chars)

    return checked


def _checked_unique(counted: Callable[[Iterable[Any]], Iterator[Any]], function: Filter) -> Filter:
    @functools.wraps(function)
    def checked(environment: Any, value: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        return function(environment, counted(value), *args, **kwargs)

    return checked


def _checked_sum(budget: Budget, function: Filter) -> Filter:
    def added(total: Any, value: Any) -> Any:
        budget.operation("+", total, value)
        return total + value

    @functools.wraps(function)
    def checked(environment: Any, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            iterable = map(make_attrgetter(environment, attribute), iterable)
        return functools.reduce(added, iterable, start)

    return checked


def _checked_format(function: Filter) -> Filter:
    @functools.wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_percent_format(str(value))
        return function(value, *args, **kwargs)

    return checked


def _values(function: Filter, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """A filter's arguments without the context that Jinja passes first to some."""
    return [*(args[1:] if hasattr(function, "jinja_pass_arg") else args), *kwargs.values()]


def _text(value: Any) -> Any:
    """A value as it is joined: marked-up texts stay what they are."""
    return value if isinstance(value, str) else str(value)
