"""The four forms in which OpenAI's API takes texts and token ids."""

from paceline.core.errors import InvalidRequest

Content = str | list[int]  # a text, or token ids
Contents = str | list[str | int | list[int]]


def contents_of(field: str, given: Contents, max_contents: int) -> list[Content]:
    """As a list of texts or of id lists. Raises InvalidRequest naming `field`."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(field, given, "must not be empty")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    contents = [item for item in given if not isinstance(item, int)]
    if ids or len({type(item) for item in contents}) > 1:
        reason = "must be a text, texts, token ids or lists of token ids, not a mixture"
        raise InvalidRequest(field, given, reason)
    check_count(field, len(contents), max_contents)
    return contents


def check_count(field: str, count: int, most: int) -> None:
    InvalidRequest.check(field, f"{count} {field}s", count <= most, f"at most {most} {field}s")
