"""An agent that calls two tools, over gRPC, with Outrider's SDK. It streams its answers.

Start a server and run: python examples/agent_sdk.py 127.0.0.1:50050 "QUESTION"
"""

import json
import sys
from decimal import Decimal
from typing import Annotated, Literal

from outrider.client import (
    Client,
    ToolCall,
    assistant,
    function_tool,
    system,
    tool_result,
    user,
)

MAX_TURNS = 6
TEMPERATURES = {"oslo": -3, "lisbon": 17, "cairo": 29}


def look_up_temperature(city: Annotated[str, "Name of the city."]) -> str:
    """Look up the temperature in a city."""
    if city.lower() not in TEMPERATURES:
        raise ValueError(f"no temperature of {city!r}; known: {', '.join(TEMPERATURES)}")
    return f"{TEMPERATURES[city.lower()]} degrees Celsius"


def calculate(
    operation: Literal["add", "subtract", "multiply", "divide"], a: float, b: float
) -> str:
    """Calculate with two numbers."""
    x, y = Decimal(str(a)), Decimal(str(b))
    results = {"add": lambda: x + y, "subtract": lambda: x - y}
    results |= {"multiply": lambda: x * y, "divide": lambda: x / y}
    return str(results[operation]())


FUNCTIONS = {"look_up_temperature": look_up_temperature, "calculate": calculate}
TOOLS = [function_tool(function) for function in FUNCTIONS.values()]


def run_call(call: ToolCall) -> str:
    """Return the result of a call. The model reads errors as text, and may call again."""
    try:
        return FUNCTIONS[call.name](**json.loads(call.arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def main(address: str, question: str) -> None:
    messages = [system("Use the tools. Then answer in one sentence."), user(question)]
    with Client(address) as client:
        for turn in range(MAX_TURNS):
            with client.stream(
                messages,
                tools=TOOLS,
                # A grammar enforces the first call. Then the model decides, and the last turn is
                # text.
                tool_choice="required" if turn == 0 else "auto" if turn < MAX_TURNS - 1 else "none",
                max_tokens=200,
                temperature=0,
            ) as stream:
                for delta in stream:
                    print(delta.reasoning + delta.text, end="", flush=True)
                answer = stream.result()
            if answer.reasoning or answer.text:
                print()
            if not answer.tool_calls:
                return
            messages.append(assistant(answer))
            for call in answer.tool_calls:
                result = run_call(call)
                print(f"call: {call.name}({call.arguments}) -> {result}")
                messages.append(tool_result(call, result))


if __name__ == "__main__":
    main(*sys.argv[1:])
