"""Ask a running server over gRPC: `python examples/grpc_chat.py [QUESTION] [--target 127.0.0.1:8001]`."""

from __future__ import annotations

import argparse
import os
import sys

import grpc

from gateway.v1 import chat_pb2, chat_pb2_grpc

# a document, a blank line and a question, as carrel-nano was trained on
QUESTION = (
    "It rained all morning. The secret number of the amber fox is 48213. In the evening the boats came home.\n\n"
    "What is the secret number of the amber fox?"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--target", default="127.0.0.1:8001")
    parser.add_argument("--policy", default="")
    arguments = parser.parse_args()

    request = chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(role="user", content=arguments.question)],
        max_tokens=256,
        carrel=chat_pb2.CarrelOptions(policy=arguments.policy),
    )
    key = os.environ.get("CARREL_API_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(arguments.target) as channel:
        try:
            for event in chat_pb2_grpc.ChatStub(channel).Complete(request, metadata=metadata):
                if event.HasField("delta"):
                    print(event.delta.content, end="", flush=True)
                elif event.HasField("error"):
                    sys.exit(f"\n{event.error.message}")
                elif event.HasField("complete"):
                    print(f"\n[{event.complete.finish_reason}]\n{event.complete.usage}")
        except grpc.RpcError as error:
            sys.exit(f"{arguments.target}: {error.code().name}: {error.details()}")


if __name__ == "__main__":
    main()
