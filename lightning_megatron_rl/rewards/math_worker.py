"""The child process of `math_verifier`: reads JSON lines [reference, response], answers each with true or false.

It is run by its path and imports nothing of this package, so that it starts with little but math-verify in memory.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from decimal import Decimal
from typing import Any

_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")  # says itself where the mathematics is
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}")
_SHORT = "(?i:cm|mm|km|kg|mg|ml|ft|in|yd|mi|lb|oz|hr|am|pm|to|of|is|at|on|by|an|no)"  # other two letters are a product
_WORD = re.compile(rf"(?<!\S)(?!(?:or|and)\b)(?:[A-Za-z]{{3,}}|{_SHORT}\b)")  # "18 dollars", not the "xy" of "2xy+1"
_NUMBER = re.compile(r"(?<![\w^{.])\d{1,3}(?:[ ,]\d{3})+|(?<![\w^{.])\d+")  # not the exponent of "20 cm^2"
_DATE = re.compile(r"\d[-/:]0\d|(?<!\d)0\d+[-/:]\d")  # "2023-05-01" and "9:00" are no sums or quotients
_SIGNS = {"π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "²": "^2", "³": "^3"}
_SIGNS |= {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "−": "-"}
_POWER = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,2})(?!\w|\.\d)")  # "5e-05", not "2e" or "e^2"
# "1\\,234", "12 345 678"; not the mixed number of "2 125/250"
_THOUSANDS = re.compile(r"(?<![\w.,}])([1-9]\d{0,2})((?:(?:\\[,;: ]|[ ~])\d{3})+)(?![\d/]|\s*\\d?t?frac)")
_DOLLAR = re.compile(r"(?<!\\)\\\$")  # a sum of money, no delimiter; not behind the end of a line, two backslashes
_BEHIND_WORD = re.compile(r"(?<=\w)(?=\\\$)")  # the dollar of "US\$5"
_POINT = re.compile(r"(?<![\w.,})\]])\.(?=\d)")  # of "-.5"
_PERCENT = re.compile(r"(\\boxed\s*\{(?:[^{}]|\{[^{}]*\})*?)(?:\\[,;! ])?\s*(?:\\?%|percent)\s*\}")
_ROOT = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]+)\)|\{([^{}]+)\})")
_NAME = re.compile(r"(?<![\\A-Za-z])(pi|ln|log(?!\d)|exp|sin|cos|tan|cot|csc|arcsin|arccos|arctan)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")  # of LaTeX
_UNIT = re.compile(rf"(?<!\S)(?:[A-Za-z]{{3,}}|{_SHORT}\b)(?:/[A-Za-z]+)?(?:\^\d)?")  # "square", "cm^2", "km/h"
_LEADS = re.compile(r"(?:[A-Za-z]{2}(?: an?)?|[=:]) $")  # to an answer
_MIXED = re.compile(r"(?<![\w.,/}])(\d{1,3}) (\d+)/(\d+)(?![\w/]|[.,]\d)")  # not the year of "in 2023 1/3 of them"


def as_latex(text: str) -> str:
    r"""Write signs, names of functions, roots and mixed numbers as LaTeX, where math-verify would read something else.

    It takes "pi" for i times p, "log 2" for 2, "2√3" for 2, "5e-05" for 5, and "2 1/2" for a product, or for 2 alone.
    In a box it sees no number before a percent sign, and a sum in "1 234"; outside none in "\$18" and "-.5".

    Example:
        ``as_latex("2√3 + log 2") == "2\\sqrt{3} + \\log 2"``; ``as_latex("2 1/2 hours") == "5/2 hours"``;
        ``as_latex("2 5/3") == "2 5/3"``.
    """
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    text = _DOLLAR.sub("", _BEHIND_WORD.sub(" ", text))
    text = _POINT.sub("0.", text)
    text = _PERCENT.sub(r"\1}", text)
    text = _THOUSANDS.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)
    text = _POWER.sub(lambda found: format(Decimal(found[0]), "f"), text)
    changed = 1
    while changed:  # from the innermost root
        text, changed = _ROOT.subn(lambda found: f"\\sqrt{{{found[1] or found[2] or found[3]}}}", text)
    text = _NAME.sub(r"\\\1", text)

    def add(found: re.Match[str]) -> str:
        whole, above, below = map(int, found.groups())
        return f"{whole * below + above}/{below}" if above < below else found[0]

    return _MIXED.sub(add, text)


def parse_reference(reference: str) -> list[Any]:
    r"""Return what a reference answer says, in math-verify's form.

    Outside dollars math-verify sees numbers alone: "2\sqrt{3}" would be 2, and "2x+3" too. An answer is read as between
    dollars, unless it is one number or fraction, has delimiters of its own, or words: beside words a formula is what is
    left without them. Dates, and words with several numbers of which math-verify would see one, are text: any response
    with that number would be right.
    """
    from math_verify import parse

    formula = as_latex(reference)
    if _DELIMITED.search(reference):
        return parse(formula, parsing_timeout=None) or parse(f"${formula}$", parsing_timeout=None)
    if _DATE.search(reference):
        return [reference]
    plain: list[Any] = parse(formula, parsing_timeout=None)
    if plain and _WORD.search(_TEXT.sub(" ", formula)):
        # what was read, which may be a formula, is one number
        rest = formula.replace(plain[-1], " 0 ")
        if _COMMAND.search(_TEXT.sub(" ", rest)):
            return parse(f"${_UNIT.sub(' ', formula)}$", parsing_timeout=None) or [formula]
        return [formula] if len(_NUMBER.findall(rest)) > 1 else plain
    if plain and plain[-1] == "".join(formula.split()):
        return plain
    return parse(f"${formula}$", parsing_timeout=None) or plain


def ends_with(response: str, reference: str) -> bool:
    r"""Return whether a response without delimiters is the reference answer, or ends with it behind a word, "=" or ":".

    Outside delimiters math-verify sees the numbers of a response alone: of "It is 36π square units." it reads 36.

    Example:
        ``ends_with("So it is 2√3.", "2√3")`` is True; ``ends_with("2 + x", "x")`` is False.
    """
    if _DELIMITED.search(response):
        return False
    said, answer = (" ".join(as_latex(text).replace("**", "").split()).rstrip(" .") for text in (response, reference))
    before = said.removesuffix(answer)
    return bool(answer) and said.endswith(answer) and (not before or _LEADS.search(before) is not None)


def main(cpu_seconds: float, memory_bytes: int, replies_fd: int) -> None:
    """Serve until the standard input ends, which it also does when the parent dies.

    A pair that takes more than `cpu_seconds` ends the process by SIGPROF, whose default action works inside native code
    as well, where a Python signal handler (math-verify's own timeout) would wait for the end of it.
    """
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # math-verify warns that its own timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    replies = os.fdopen(replies_fd, "w")  # not the standard output, where libraries print (ANTLR its version)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        reference, response = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        said = parse(as_latex(response), parsing_timeout=None)
        equal = ends_with(response, reference) or verify(parse_reference(reference), said, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(equal)), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
