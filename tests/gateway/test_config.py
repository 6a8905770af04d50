"""Test which options the gateway refuses; tests/carrel/process tests how options are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.cluster.options import ClusterOptions, gateway_config
from carrel.process.options import OptionError
from gateway.config import GatewayConfig, parse_config


def test_open_addresses_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(OptionError, match="--allow-open"):
            GatewayConfig(model="m", worker="unix:w", host=host)
        GatewayConfig(model="m", worker="unix:w", host=host, allow_open=True)
        GatewayConfig(model="m", worker="unix:w", host=host, api_keys=("k",))
    for host in ("127.0.0.1", "::1", "localhost"):
        GatewayConfig(model="m", worker="unix:w", host=host)


def test_keys_and_names_come_with_commas_or_blanks_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_API_KEY", "a, b")
    monkeypatch.setenv("CARREL_MODEL", "some/model")
    config = parse_config(["--worker", "unix:w"])
    assert config.api_keys == ("a", "b")
    assert "'a'" not in repr(config)
    assert config.model_names == ("some/model",)
    config = parse_config(["--worker", "unix:w", "--api-key", "c", "d", "--served-model-name", "x", "y,z"])
    assert config.api_keys == ("c", "d")
    assert config.model_names == ("x", "y", "z")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--worker is missing: give it, or set CARREL_WORKER"),
        (["--worker", "unix:w", "--port", "8001"], "--grpc-port"),
        (["--worker", "unix:w", "--api-key", "a\nb"], "--api-key"),
        *(
            (["--worker", "unix:w", "--api-key", text], r"--api-key '\*\*\*'.*must hold a key")
            for text in ("", " ", ",", ", ,")
        ),
        (["--worker", "unix:w", "--ssl-keyfile", "/k.pem"], "--ssl-certfile"),
        (["--worker", "worker:8101"], "--allow-plain-worker"),
        (["--worker", "worker:8101", "--worker-ca-file", "/c.pem"], "needs --worker-client-keyfile"),
        (
            ["--worker", "unix:w", "--ssl-keyfile", "/k.pem", "--ssl-certfile", "/none.pem"],
            "/none.pem.* cannot be used",
        ),
    ],
)
def test_bad_options_name_the_remedy(arguments: list[str], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        parse_config(["--model", "m", *arguments])


def test_a_variable_without_a_key_does_not_open_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (",", " ", " , "):
        monkeypatch.setenv("CARREL_API_KEY", text)
        with pytest.raises(OptionError, match="must hold a key"):
            parse_config(["--worker", "unix:w", "--model", "m"])
        with pytest.raises(OptionError, match="must hold a key"):
            gateway_config(ClusterOptions(allow_open=True), {"CARREL_API_KEY": text})
    # compose files pass on what is not set
    monkeypatch.setenv("CARREL_API_KEY", "")
    assert not parse_config(["--worker", "unix:w", "--model", "m"]).has_keys


@pytest.mark.parametrize(
    ("keys", "asked", "limit"),
    [
        ((), None, None),
        (("a",), None, None),
        # one key, given twice
        (("a", "a"), None, None),
        (("a", "b"), None, 25),
        (("a", "b"), 80, 80),
        (("a",), 3, 3),
    ],
)
def test_one_of_several_keys_has_a_quarter_of_the_places(
    keys: tuple[str, ...], asked: int | None, limit: int | None
) -> None:
    config = GatewayConfig(
        model="m", worker="unix:w", api_keys=keys, max_concurrent=100, max_concurrent_per_key=asked
    )
    assert config.max_per_key(len(set(keys))) == limit


def test_a_model_is_named_by_its_folder(tmp_path: Path) -> None:
    assert GatewayConfig(model=str(tmp_path), worker="unix:w").model_names == (tmp_path.name,)
