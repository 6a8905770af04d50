"""Models as JSON: what was not set is left out."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from gateway.rest.schemas import Body


def written(body: Body) -> bytes:
    """The JSON of a body. Of a million token ids it takes some milliseconds, in which no other thread goes on."""
    return body.__pydantic_serializer__.to_json(body, exclude_unset=True, by_alias=True)


class BodyResponse(JSONResponse):
    """A response that is a body; of a long one it belongs in a thread."""

    def render(self, content: Body) -> bytes:
        """The body's JSON."""
        return written(content)
