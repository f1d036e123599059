"""Configs as YAML, both ways. No torch here; PyYAML is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from flashdreams.config.base import ConfigError
from flashdreams.config.plain import Word, apply_dict, to_dict

if TYPE_CHECKING:
    import yaml

C = TypeVar("C")

_MAX_DEPTH = 64
_QUOTED_WORDS = {"inf", "infinity", "nan", "none"}
"""Words that YAML would leave bare, and a reader might take for a number or for nothing."""


def to_yaml(config: Any) -> str:
    """The config tree as YAML; :func:`apply_yaml` on a config of the same classes gives it back, equal."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        bare = value.isprintable() and value[:1].isalpha() and value.lower() not in _QUOTED_WORDS
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if bare else '"')

    def sequence(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
        in_line = not any(isinstance(item, dict) for item in value)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=in_line)

    Dumper.add_representer(str, text)
    Dumper.add_representer(list, sequence)
    return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def apply_yaml(config: C, text: str) -> C:
    """A copy of ``config`` with the fields that the YAML ``text`` sets; it may set a part of them.

    Raises:
        ConfigError: the text is no YAML mapping, uses tags, anchors or a key twice, names an unknown field, or
            gives a value that does not fit its field.
    """
    import yaml

    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the file is not valid YAML: {' '.join(str(error).split())}") from None
    return apply_dict(config, {} if node is None else _plain(node))


def _check_events(events: Iterable[yaml.Event]) -> None:
    """Refuse what no config needs, before anything is built from it."""
    import yaml

    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or getattr(event, "anchor", None):
            raise ConfigError(
                f"{_place(event)}: tags (!), anchors (&) and aliases (*) have no meaning in a config file; "
                "quote the text if it starts with such a sign"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{_place(event)}: the file is nested too deeply for a config")


def _plain(node: yaml.Node) -> Any:
    """A YAML node as dicts, lists and text; unquoted scalars are left as words, whose type their field decides."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return Word(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    tree: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{_place(key)}: a key must be the name of a field")
        if key.value in tree:
            raise ConfigError(f"{_place(key)}: {key.value!r} is given twice")
        tree[key.value] = _plain(value)
    return tree


def _place(marked: Any) -> str:
    return f"line {marked.start_mark.line + 1}"
