from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack, write_tokenizer
from waiting import PATIENCE


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("open"), model_dir) as stack:
        yield stack


@pytest.fixture(scope="session")
def shared_locked_stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("locked")
    # of two places each key has one
    keys = ("right-key", "other-key", "third-key")
    with running_stack(folder, model_dir, api_keys=keys, max_concurrent=2) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.script = Script()
    return shared_stack


@pytest.fixture
def locked_stack(shared_locked_stack: Stack) -> Stack:
    shared_locked_stack.script = Script()
    return shared_locked_stack


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client
