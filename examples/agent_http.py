"""An agent that calls two tools, over HTTP, with the `openai` package.

Start a server and run: python examples/agent_http.py http://127.0.0.1:8000/v1 "QUESTION"
"""

import json
import sys
from decimal import Decimal

from openai import OpenAI

MAX_TURNS = 6
TEMPERATURES = {"oslo": -3, "lisbon": 17, "cairo": 29}


def look_up_temperature(city: str) -> str:
    if city.lower() not in TEMPERATURES:
        raise ValueError(f"no temperature of {city!r}; known: {', '.join(TEMPERATURES)}")
    return f"{TEMPERATURES[city.lower()]} degrees Celsius"


def calculate(operation: str, a: float, b: float) -> str:
    x, y = Decimal(str(a)), Decimal(str(b))
    results = {"add": lambda: x + y, "subtract": lambda: x - y}
    results |= {"multiply": lambda: x * y, "divide": lambda: x / y}
    return str(results[operation]())


FUNCTIONS = {"look_up_temperature": look_up_temperature, "calculate": calculate}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up_temperature",
            "description": "Look up the temperature in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate with two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "operation": {"enum": ["add", "subtract", "multiply", "divide"]},
                    "a": {"type": "number"},
                    "b": {"type": "number"},
                },
                "required": ["operation", "a", "b"],
                "additionalProperties": False,
            },
        },
    },
]


def run_call(call) -> str:
    """Return the result of a call. The model reads errors as text, and may call again."""
    try:
        return FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def main(url: str, question: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    messages = [
        {"role": "system", "content": "Use the tools. Then answer in one sentence."},
        {"role": "user", "content": question},
    ]
    for turn in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=messages,
            tools=TOOLS,
            # A grammar enforces the first call. Then the model decides, and the last turn is text.
            tool_choice="required" if turn == 0 else "auto" if turn < MAX_TURNS - 1 else "none",
            max_tokens=200,
            temperature=0,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print("answer:", message.content)
            return
        results = []
        for call in message.tool_calls:
            result = run_call(call)
            print(f"call: {call.function.name}({call.function.arguments}) -> {result}")
            results.append({"role": "tool", "tool_call_id": call.id, "content": result})
            # A call that was cut off or malformed is refused in a conversation.
            if not is_object(call.function.arguments):
                call.function.arguments = "{}"
        messages += [message, *results]


if __name__ == "__main__":
    main(*sys.argv[1:])
