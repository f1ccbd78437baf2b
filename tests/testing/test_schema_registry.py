"""The registry for tests: what a client that registers schemas itself sees of it."""

import base64
import json

import httpx
import pytest

from tidemill.testing.schema_registry import DevelopmentRegistry


@pytest.fixture
def registry():
    with DevelopmentRegistry() as running:
        yield running


def test_schemas_are_registered_over_http_and_found_by_number_and_version(registry):
    with httpx.Client(base_url=registry.url) as client:
        answers = [
            client.post("/subjects/a%2Fb-value/versions", json={"schema": text, **more}).json()
            for text, more in (('"int"', {}), ('"long"', {}), ('"int"', {}), ("{}", {"schemaType": "JSON"}))
        ]
        assert [answer["id"] for answer in answers] == [1, 2, 1, 3]
        assert client.get("/schemas/ids/2").json() == {"schema": '"long"'}
        assert client.get("/schemas/ids/3").json() == {"schema": "{}", "schemaType": "JSON"}
        assert client.get("/subjects/a%2Fb-value/versions/1").json() == {"schema": '"int"'}
        assert client.get("/subjects/a%2Fb-value/versions/latest").json()["schema"] == "{}"
        assert client.get("/schemas/ids/9").status_code == 404
        assert client.get("/subjects/nobody/versions/1").json()["error_code"] == 40402
        assert client.post("/elsewhere", json={}).status_code == 404
        assert client.post("/subjects/x/versions", json={"schema": 1}).status_code == 422
    assert registry.register("other", '"int"') == 1


def test_protobuf_schemas_come_serialized_only(registry):
    text = registry.protobuf_text(b"\n\x05a.pro")
    number = registry.register("p", text, "PROTOBUF")
    assert base64.b64decode(text) == b"\n\x05a.pro"
    with httpx.Client(base_url=registry.url) as client:
        assert client.get(f"/schemas/ids/{number}").status_code == 422
        assert client.get(f"/schemas/ids/{number}", params={"format": "serialized"}).json()["schema"] == text


def test_rights_and_faults():
    with DevelopmentRegistry(user="reader", password="geheim") as registry, httpx.Client(base_url=registry.url) as client:
        number = registry.register("v", json.dumps("int"))
        assert client.get(f"/schemas/ids/{number}").status_code == 401
        assert client.get(f"/schemas/ids/{number}", auth=("reader", "geheim")).status_code == 200
        registry.fail_next(503, 0)
        assert client.get(f"/schemas/ids/{number}", auth=("reader", "geheim")).status_code == 503
        with pytest.raises(httpx.TransportError):
            client.get(f"/schemas/ids/{number}")
    registry.close()


@pytest.mark.parametrize(
    ("indexes", "head"), [(None, b""), ([0], b"\0"), ([1], b"\x02\x02"), ([1, 0], b"\x04\x02\0"), ([200], b"\x02\x90\x03")]
)
def test_headers_as_clients_write_them(indexes, head):
    assert DevelopmentRegistry.header(258, indexes) == b"\0\0\0\x01\x02" + head
