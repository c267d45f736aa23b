"""The base of all specs: a frozen attrs class that checks all its fields and reports all problems at once.

Independent of what the specs mean. A class below `Spec` is a family (`Objective`) or a single noun (`Mesh`); a
class below a family is a member, reachable as `Objective.DPO`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import attrs

from nnxdsl.config.core.fields import as_pairs, check_annotation, check_value, resolve, show
from nnxdsl.errors import Problem, SpecError, suggest

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

_HOME = ("nnxdsl.config.", "nnxdsl.models.families.")
"""Where the built-in classes are."""

registry: dict[str, type[Spec]] = {}
"""Every noun, family and built-in member by the name that Python code uses for it: `Mesh`, `Objective.DPO`."""

third_party: dict[str, type[Spec]] = {}
"""Every class of other packages that this process has defined, by its tag `module:name`; the last of each tag."""


class UnsetError(AttributeError):
    """A field was read that is unset, since the value given for it is invalid."""


def _init(self: Spec, *args: object, **values: object) -> None:
    """Checks all fields, and raises one error with all problems."""
    cls = type(self)
    if "__attrs_attrs__" not in vars(cls):
        raise TypeError(_declare_it(cls))
    problems: list[Problem] = []
    fields, bound = declared(cls), _bind(cls, args, values, problems)
    bound_values = {
        name: as_pairs(value, fields[name].type) if name in fields else value for name, value in bound.items()
    }
    _fill(self, bound_values, problems)
    if problems:
        raise SpecError(problems, describe(cls, bound_values))


def _equal(self: Spec, other: object) -> bool:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return all(getattr(self, name) == getattr(other, name) for name in attrs.fields_dict(type(self)))


def _hash(self: Spec) -> int:
    return hash((type(self), *(getattr(self, name) for name in attrs.fields_dict(type(self)))))


def _repr(self: Spec) -> str:
    fields = (f"{name}={getattr(self, name, attrs.NOTHING)!r}" for name in attrs.fields_dict(type(self)))
    return f"{type(self).__qualname__.rpartition('>.')[2]}({', '.join(fields)})"


_METHODS: dict[str, Callable[..., Any]] = {"__init__": _init, "__eq__": _equal, "__hash__": _hash, "__repr__": _repr}
"""The methods of all specs, in place of those that attrs would compile for each class."""


class _Signature:
    """The signature of a class, for `help` and `inspect.signature`."""

    def __get__(self, instance: object, cls: type[Spec]) -> inspect.Signature:
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        fields = sorted(attrs.fields(cls), key=lambda field: field.kw_only)
        return inspect.Signature(
            [
                inspect.Parameter(
                    field.name,
                    kinds[not field.kw_only],
                    default=inspect.Parameter.empty if field.default is attrs.NOTHING else field.default,
                    annotation=field.type,
                )
                for field in fields
            ]
        )


@attrs.frozen(kw_only=True)
class Spec:
    """Base of every object that an experiment is made of.

    Subclasses are decorated with `@attrs.frozen(kw_only=True)`; one that is not, or that declares a field which could
    not go through JSON and back, is a TypeError. A class may override `problems` to check fields against each other.
    Fields are strictly typed (only int widens to float), and hold numbers, text, tuples, None and other specs.

    A class that sets `is_base` has the fields that some members of a family share, and is no member.

    A field that a class gets after experiments with it have run is named in `fields_added_later`, and its default is
    what the class did before: where it holds that, the identity leaves it out, so that those runs keep their ids.
    Fields in `outside_identity` never count.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset()
    outside_identity: ClassVar[frozenset[str]] = frozenset()
    is_base: ClassVar[bool] = False
    derived: ClassVar[Mapping[str, str]] = {}
    """Fields that `derived_defaults` fills, and what their values follow from, for people."""
    default_member: ClassVar[str] = ""
    """The member that a call of the family with arguments builds; empty where one is to be named."""
    earlier_tag: ClassVar[str] = ""
    """The tag of the class in experiments that ran before it had its own: it is read, and identities keep it."""
    family: ClassVar[type[Spec]]
    tag: ClassVar[str]

    if not TYPE_CHECKING:  # a type checker takes them from the decorator
        __signature__ = _Signature()

        def __init_subclass__(cls, **options: Any) -> None:
            # attrs leaves methods that a class has: its own, compiled for each class, would take a third of the import.
            super().__init_subclass__(**options)
            for name, method in _METHODS.items():
                if name not in vars(cls):
                    setattr(cls, name, method)

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        _check_declaration(cls)
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Spec))
        cls.family = cls if parent is Spec else parent.family
        if "is_base" in vars(cls):
            cls.tag = cls.__name__
        elif cls.__module__.startswith(_HOME):
            if cls.family is not cls:
                setattr(cls.family, cls.__name__, cls)
                cls.__qualname__ = f"{cls.family.__name__}.{cls.__name__}"
                vars(sys.modules[cls.__module__]).setdefault(cls.family.__name__, cls.family)  # pickle looks there
            cls.tag = cls.__name__
            registry[cls.__qualname__] = cls
            _members.cache_clear()
        else:
            cls.tag = f"{cls.__module__}:{cls.__qualname__}"
            third_party[cls.tag] = cls

    @classmethod
    def derived_defaults(cls, values: Mapping[str, object]) -> Mapping[str, object]:
        """Values of fields that are not given, where those follow from others; an object holds them as if given.

        Args:
            values: those that are given, none of which has been checked; `BROKEN` for one that could not be built.
        """
        return {}

    def problems(self) -> Iterable[Problem]:
        """Problems between fields that are each valid; paths relative to this object.

        It may be called while some fields are invalid: reading one of those raises UnsetError, which ends the check.
        Checks that read different fields belong in functions of their own, joined by `gather`.
        """
        return ()

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Problems between this part and the rest of the experiment that it is a field of; paths from the experiment.

        Like `problems` it may be called while fields of the experiment are invalid; `gather` joins independent checks.
        """
        return ()

    def import_names(self) -> Mapping[str, str]:
        """Fields whose value is the `module:name` of code that this object will import, and that name."""
        return {}

    def _repr_html_(self) -> str:
        """A tree of all settings, for notebooks."""
        assert _html_page is not None  # set by the package
        return _html_page(self)

    def identity_values(self) -> Mapping[str, object]:
        """What counts in the identity in place of a field's value, for fields with several spellings of one meaning."""
        return {}

    @classmethod
    def hint_for(cls, value: object) -> str:
        """What to write where `value` was given for this class, to end a message; empty where there is no hint."""
        if isinstance(value, type) and issubclass(value, cls) and not is_family(value):
            return f"; write {value.__qualname__}(...)"
        if is_family(cls) and not isinstance(value, Spec):
            return f"; use one of its members: {members_hint(cls)}"
        return ""

    @classmethod
    def field_hint(cls, name: str, value: object) -> str:
        """What to write where `value` is not valid for `name`, or the class has no such field; empty for no hint."""
        return ""

    if not TYPE_CHECKING:  # a type checker is to complain of every name that is not declared

        def __getattr__(self, name: str) -> Any:
            fields = attrs.fields_dict(type(self))
            # A property that reads an unset field ends here as well, under its own name.
            reads = isinstance(getattr(type(self), name, None), property)
            unset = name in fields or (reads and _is_unfinished(self))
            kind = UnsetError if unset else AttributeError
            raise kind(f"'{type(self).__qualname__}' object has no attribute '{name}'", name=name, obj=self)


Spec.family = Spec
SpecT = TypeVar("SpecT", bound=Spec)


_html_page: Callable[[Spec], str] | None = None


def register_html(page: Callable[[Spec], str]) -> None:
    """Sets what draws a spec in notebooks."""
    global _html_page
    _html_page = page


class Field(NamedTuple):
    """One declared field, its annotation resolved and its default as an object holds it."""

    type: Any
    default: object
    check: Callable[..., Any] | None
    positional: bool


class Broken:
    """Marks a value that could not be built and whose problem is reported already: its field stays unset."""


BROKEN = Broken()


def _is_unfinished(spec: Spec) -> bool:
    """Whether a field of an object, or of one inside it, is unset."""
    for field in attrs.fields_dict(type(spec)):
        try:
            value = object.__getattribute__(spec, field)
        except AttributeError:
            return True
        if any(_is_unfinished(each) for each in _specs_in(value)):
            return True
    return False


def _specs_in(value: object) -> Iterator[Spec]:
    """A value of a field if it is a spec, or those in its tuples, such as the sources of a mixture."""
    if isinstance(value, Spec):
        yield value
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _specs_in(item)


def gather(*checks: Callable[[], Iterable[Problem]]) -> Iterator[Problem]:
    """The problems of several checks; a check that reads an unset field ends there, the others run."""
    for check in checks:
        try:
            yield from check()
        except UnsetError:
            continue


def assemble(cls: type[SpecT], values: Mapping[str, object], problems: list[Problem]) -> SpecT:
    """Build `cls` as far as its values allow, adding what is wrong to `problems`.

    Fields that are wrong or missing stay unset, so that the checks which do not read them still run and a caller can
    show every problem of a tree at once. The object must be used only if `problems` stayed empty.
    """
    built = object.__new__(cls)
    _fill(built, values, problems)
    return built


def _fill(spec: Spec, values: Mapping[str, object], problems: list[Problem]) -> None:
    cls = type(spec)
    fields = declared(cls)
    if is_family(cls) or "is_base" in vars(cls):
        problems.append(Problem("", f"{cls.__name__} is a family; use one of its members: {members_hint(cls.family)}"))
    for name, value in values.items():
        if name not in fields:
            hint = cls.field_hint(name, value) or suggest(name, fields)
            problems.append(Problem(name, f"{cls.__name__} has no field '{name}'{hint}"))
    values = {**cls.derived_defaults(values), **values}
    for name, field in fields.items():
        value = values.get(name, field.default)
        if value is BROKEN:
            continue
        if value is attrs.NOTHING:
            problems.append(Problem(name, f"{cls.__qualname__} needs it"))
            continue
        if value is not field.default:
            value, field_problems = _check_field(field, value)
            if field_problems:
                hint = cls.field_hint(name, value)
                problems += [Problem(problem.path, problem.message + hint).under(name) for problem in field_problems]
                continue
        object.__setattr__(spec, name, value)
    problems += gather(spec.problems)


def _check_field(field: Field, value: object) -> tuple[object, list[Problem]]:
    checked, field_problems = check_value(value, field.type)
    if not field_problems and field.check is not None:
        try:
            field.check(None, None, checked)
        except (ValueError, TypeError) as error:
            field_problems = [Problem("", str(error.args[0] if error.args else error))]
    return checked, field_problems


def _bind(
    cls: type[Spec], args: tuple[object, ...], values: Mapping[str, object], problems: list[Problem]
) -> dict[str, object]:
    if not args:
        return dict(values)
    positional = [name for name, field in declared(cls).items() if field.positional]
    if len(args) > len(positional):
        allowed = f"only {', '.join(positional)}" if positional else "no value"
        extra = ", ".join(show(arg) for arg in args[len(positional) :])
        message = f"takes {allowed} without a name, got {extra}; write name=value"
        problems.append(Problem("", message))
    bound = dict(zip(positional, args, strict=False))
    problems += [Problem(name, "is given twice, without its name and with it") for name in bound if name in values]
    return {**bound, **values}


def _declare_it(cls: type[Spec]) -> str:
    return f"{cls.__module__}.{cls.__qualname__} must be declared with @attrs.frozen(kw_only=True)"


def _check_declaration(cls: type[Spec]) -> None:
    """Checks a class while it is being defined, before its annotations can be resolved."""
    props = attrs.inspect(cls)
    made = _METHODS.items() <= vars(cls).items() and not hasattr(cls, "__attrs_post_init__")
    if not (props.is_frozen and props.kw_only is attrs.ClassProps.KeywordOnly.YES and made):
        detail = "" if made else ", with __init__, __eq__ and __repr__ left to attrs"
        raise TypeError(_declare_it(cls) + detail)
    for field in attrs.fields(cls):
        location = f"{cls.__module__}.{cls.__qualname__}.{field.name}"
        if field.name in ("type", "schema") or field.name.startswith("_"):
            raise TypeError(f"{location}: a spec's field cannot have this name")
        if not field.init or not field.eq or field.converter is not None or field.alias != field.name:
            raise TypeError(
                f"{location}: of the options of attrs.field, a spec's field takes default and validator alone"
            )
        if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
            raise TypeError(f"{location}: write the default itself; specs cannot change, so all may share it")


@functools.cache
def declared(cls: type[Spec]) -> dict[str, Field]:
    """Every field of `cls` by name, in the order of the class.

    Raises:
        TypeError: if an annotation cannot be resolved or cannot go through JSON, or if a default is not of its type.
    """
    types: dict[str, Any] = {}
    nouns = {name: noun for name, noun in registry.items() if "." not in name}
    for base in reversed(cls.__mro__):
        space = {**nouns, **vars(sys.modules.get(base.__module__, sys))}
        types |= resolve(base, space, names=attrs.fields_dict(cls))
    fields: dict[str, Field] = {}
    for attribute in attrs.fields(cls):
        location = f"{cls.__module__}.{cls.__qualname__}.{attribute.name}"
        if attribute.name not in types:
            raise TypeError(f"{location}: a spec's field needs an annotation")
        check_annotation(types[attribute.name], location, Spec)
        field = Field(types[attribute.name], attribute.default, attribute.validator, not attribute.kw_only)
        if field.default is not attrs.NOTHING:
            default, field_problems = _check_field(field, field.default)
            if field_problems:
                raise TypeError(f"{location}: wrong default: {field_problems[0].message}")
            field = field._replace(default=default)
        fields[attribute.name] = field
    return fields


def field_types(cls: type[Spec]) -> dict[str, Any]:
    """The resolved annotation of every field of `cls`."""
    return {name: field.type for name, field in declared(cls).items()}


def is_family(cls: type[Spec]) -> bool:
    """Whether `cls` is a family whose members are used in its place."""
    return cls.family is cls and (cls is Spec or bool(_members(cls)))


def members(family: type[SpecT]) -> dict[str, type[SpecT]]:
    """The built-in members of a family by short name: in the order in which it declares them, then by name."""
    return cast("dict[str, type[SpecT]]", dict(_members(family)))


@functools.cache
def _members(family: type[Spec]) -> dict[str, type[Spec]]:
    prefix = f"{family.__name__}."
    if registry.get(family.__name__) is not family:
        return {}
    by_name = {name.removeprefix(prefix): cls for name, cls in registry.items() if name.startswith(prefix)}
    order = {name: index for index, name in enumerate(family.__annotations__)}
    return dict(sorted(by_name.items(), key=lambda item: (order.get(item[0], len(order)), item[0].casefold())))


def members_hint(family: type[Spec]) -> str:
    """`Objective.SFT, Objective.DPO`, for messages."""
    return ", ".join(cls.__qualname__ for cls in members(family).values())


def is_builtin(cls: type[Spec]) -> bool:
    """Whether `cls` is one of nnxdsl's own."""
    return registry.get(cls.__qualname__) is cls


def require_importable(cls: type[Spec]) -> None:
    """Refuse a class that another process could not import by its module and name.

    Raises:
        SpecError: saying where the class belongs.
    """
    if is_builtin(cls):
        return
    try:
        imported: object = operator.attrgetter(cls.__qualname__)(sys.modules[cls.__module__])
    except (KeyError, AttributeError):
        imported = None
    if imported is not cls or cls.__module__ == "__main__":
        location = f"{cls.__module__}.{cls.__qualname__}"
        raise SpecError([Problem("", f"{location} cannot be imported again; put the class in a module of its own")])


def describe(cls: type[Spec], values: Mapping[str, object]) -> str:
    """`Experiment 'dpo-gemma3-1b'`: the class, and the name if it has one."""
    called = values.get("name")
    return f"{cls.__qualname__} {called!r}" if isinstance(called, str) else cls.__qualname__
