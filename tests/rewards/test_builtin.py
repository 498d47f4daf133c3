import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_megatron_rl.rewards import ExactMatch, math_equal
from tests.rewards.samples import make_sample


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("72", "72", 1.0),
        (" 72\n", "72", 1.0),
        ("so 23 + 49 = 72.", "72", 1.0),
        ("not 73 but \\boxed{72}", "72", 1.0),
        ("\\boxed{72}, not 73", "72", 1.0),
        ("73", "72", 0.0),
        ("172", "72", 0.0),
        ("", "72", 0.0),
        ("It is $\\frac{1}{2}$.", "0.5", 1.0),
        ("0.5", "\\frac{1}{2}", 1.0),
        ("$1 + x$", "x+1", 1.0),
        ("1234", "1,234", 1.0),
        ("-5", "5", 0.0),
        # answers in LaTeX without dollars, as MATH has them: not the first number in them
        ("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}", 1.0),
        ("\\boxed{2}", "2\\sqrt{3}", 0.0),
        ("so $3 + 2x$", "2x+3", 1.0),
        ("so 2", "2x+3", 0.0),
        ("$\\boxed{5\\pi}$", "5\\pi", 1.0),
        ("5", "5\\pi", 0.0),
        ("$\\frac{5}{3}$", "1 \\frac{2}{3}", 1.0),
        ("\\boxed{3, 1}", "1,3", 1.0),
        ("\\boxed{\\frac{3x}{2}-1}", "\\frac{3}{2}x-1", 1.0),
        # and those that it reads without
        ("$2\\sqrt{3}$", "$2\\sqrt{3}$", 1.0),
        ("18", "18 dollars", 1.0),
        ("10", "10 km/h", 1.0),
        ("20", "20 cm^2", 1.0),
        ("0.5", "\\frac{1}{2} hours", 1.0),
        ("1000", "1 000", 1.0),
        # a mixed number is a sum, a date is no number, and of several numbers in words none is the answer
        ("2.5", "2 1/2", 1.0),
        ("1.5", "2 1/2", 0.0),
        ("-2.5", "-2 1/2", 1.0),
        ("It takes 2 1/2.", "2.5", 1.0),
        ("It takes 2 1/2 hours", "1", 0.0),
        ("\\boxed{2 1/2}", "2 1/2", 1.0),
        ("$-2 1/2$", "-2.5", 1.0),
        ("2.5", "2 1/2 hours", 1.0),
        ("on 2023-05-02", "2023-05-01", 0.0),
        ("on 2023-05-01", "2023-05-01", 1.0),
        ("5", "05/01/2023", 0.0),
        ("9:00 PM", "9:00 AM", 0.0),
        ("\\boxed{9:00 AM}", "9:00 AM", 1.0),
        ("2 apples and 5 pears", "3 apples and 5 pears", 0.0),
        ("3 apples and 5 pears", "3 apples and 5 pears", 1.0),
        ("2 1/2 apples and 5 pears", "2 1/2 apples and 5 pears", 1.0),
        ("0.5", "2\\frac{1}{2} hours", 0.0),
        ("1234.5", "1,234.5", 1.0),
        # names of functions and signs are LaTeX's, and a formula with a unit is not the number in it
        ("\\boxed{\\frac{\\pi}{2}}", "pi/2", 1.0),
        ("\\boxed{pi/2}", "\\frac{\\pi}{2}", 1.0),
        ("\\boxed{\\log 2}", "log 2", 1.0),
        ("2", "log 2", 0.0),
        ("\\boxed{ln2}", "\\ln 2", 1.0),
        ("\\boxed{\\sin^2 x}", "sin^2 x", 1.0),
        ("2", "2√3", 0.0),
        ("\\boxed{2√3}", "2\\sqrt{3}", 1.0),
        ("\\boxed{\\sqrt{2+\\sqrt{3}}}", "sqrt(2 + sqrt(3))", 1.0),
        ("3", "3×10^8", 0.0),
        ("\\boxed{3 \\times 10^8}", "3×10^8", 1.0),
        ("\\boxed{2.5}", "2½", 1.0),
        ("\\boxed{(0, \\infty)}", "(0, ∞)", 1.0),
        ("36", "36π square units", 0.0),
        ("\\boxed{36\\pi}", "36π square units", 1.0),
        ("\\boxed{36\\pi \\text{ cm}^2}", "36\\pi cm^2", 1.0),
        ("36", "36\\pi cm^2", 0.0),
        ("\\boxed{5\\sqrt{2}}", "5\\sqrt{2} meters", 1.0),
        # without delimiters a response is read as text, where its end is the answer
        ("36π square units", "36π square units", 1.0),
        ("So the area is **36π square units**.", "36π square units", 1.0),
        ("It is 136π square units", "36π square units", 0.0),
        ("log 2", "log 2", 1.0),
        ("x = 2√3", "2√3", 1.0),
        ("It is -2√3", "2√3", 0.0),
        ("2 + x", "x", 0.0),
        ("We get a 2 × 3 matrix.", "2 × 3 matrix", 1.0),
        ("It is 12π.", "12\\pi", 1.0),
        # two letters are a product, unless they are a unit or a word
        ("0.5", "\\frac{1}{2} bh", 0.0),
        ("\\boxed{\\frac{bh}{2}}", "\\frac{1}{2} bh", 1.0),
        ("\\boxed{9}", "9 am", 1.0),
        ("Paris", "Paris", 1.0),
        ("London", "Paris", 0.0),
        (r"so it is \boxed{50\%}", "50", 1.0),
        (r"\boxed{50\%}", "50%", 1.0),
        (r"$\boxed{12.5\,\%}$", r"12.5\%", 1.0),
        (r"\boxed{50\%}", "5", 0.0),
        ("so 5 − 8 = −3", "-3", 1.0),  # the sign of Unicode
        ("5 − 8 = −3", "8", 0.0),
        ("it is −3", "-3", 1.0),
        (r"\boxed{0.00005}", "5e-05", 1.0),  # as Python writes the number of a column
        ("It is 5e-5.", "0.00005", 1.0),
        ("It is 5e-05.", "5", 0.0),
        ("10000000000000000", "1e+16", 1.0),
        ("$2e$", "2e", 1.0),
        (r"\boxed{1\,234}", "1234", 1.0),
        (r"\boxed{1\,234}", "235", 0.0),
        (r"\boxed{12 345 678}", "12,345,678", 1.0),
        (r"$1\,234.5$", "1234.5", 1.0),
        ("1234", r"1\,234", 1.0),
        ("2 125/250", "2.5", 1.0),  # a mixed number still
        (r"She makes \$18 every day.", "18", 1.0),  # sums of money, as Markdown has them
        (r"The total is **\$1,200**.", "1,200", 1.0),
        (r"She makes 9 * 2 = \$19 every day.", "18", 0.0),
        (r"It is US\$5, so -\$7 in all.", "-7", 1.0),
        (r"\boxed{\$18.50}", r"\$18.50", 1.0),
        (r"$2 \times 9 = \$18$", "18", 1.0),
        ("x is -.5", "-0.5", 1.0),
        ("It costs $.50.", "0.5", 1.0),
        ("0.5", ".5", 1.0),
    ],
)
def test_math_equal(response: str, answer: str, expected: float):
    assert math_equal([make_sample(response, answer)]) == [expected]


def test_math_equal_keeps_the_order_and_works_in_threads():
    samples = [make_sample(f"it is {i % 3}", "1") for i in range(9)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(math_equal, [samples] * 3, timeout=120)) == [[0.0, 1.0, 0.0] * 3] * 3


@pytest.mark.parametrize("answer", [None, "", "  "])
@pytest.mark.parametrize("reward", [math_equal, ExactMatch()])
def test_prompt_without_answer_is_refused(reward, answer: str | None):
    with pytest.raises(ValueError, match=r"needs the answer.*prompt 4 of 'train'.*map a column .* to `answer`"):
        reward([make_sample("1", "1"), make_sample("1", answer, index=4)])


def test_exact_match():
    samples = [make_sample(" Paris\n", "Paris"), make_sample("paris", "Paris"), make_sample("Pa ris", "Paris")]
    assert ExactMatch()(samples) == [1.0, 0.0, 0.0]
    assert ExactMatch(ignore_case=True)(samples) == [1.0, 1.0, 0.0]
    assert ExactMatch(strip=False)([*samples, make_sample("Paris", "Paris")]) == [0.0, 0.0, 0.0, 1.0]


def test_import_loads_nothing_heavy():
    heavy = {"torch", "sympy", "math_verify", "jsonschema"}
    code = f"import sys, lightning_megatron_rl.rewards; print(sorted({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"
