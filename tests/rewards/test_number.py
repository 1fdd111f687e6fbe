r"""Numbers are read in every notation that docs/rewards.md names: formatted, and read back."""

# ruff: noqa: RUF001

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from unicodedata import name

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.components.rewards.number import read_number

PAGE = (Path(__file__).resolve().parents[2] / "docs/rewards.md").read_text()

MINUS_SIGNS = ["-", "\u2212", "\u2010", "\u2011", "\u2012", "\u2013", "\ufe63", "\uff0d"]
SPACES = [" ", "\u00a0", "\u2002", "\u2005", "\u2007", "\u2009", "\u200a", "\u202f"]
MARKS = [",", "'", "\u2019", "_", "{,}", "\\,", ",\\!", *SPACES]
VULGAR = [chr(code) for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))]
BEFORE = [
    "",
    "The answer is ",
    "x = ",
    "Answer:\n",
    "- ",
    "* ",
    "2024: ",
    "(",
    "about ",
    "**",
    "答案是",
    "in 2024 there were ",
]
AFTER = ["", ".", " cm", " m/s^2", " cm³", " kg m^{-2}", "m", ")", "**", " cups.", "\n", "个", "\\,\\text{cm}^2"]


def last(text: str) -> float | None:
    return read_number(text, "last", 0.01)


def full_width(text: str) -> str:
    return "".join(chr(ord(each) + 0xFEE0) if each in "0123456789.,%-/" else each for each in text)


def superscript(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


signs = st.sampled_from([("", 1), ("+", 1), *((sign, -1) for sign in MINUS_SIGNS)])
wholes = st.integers(0, 10**9)
small = st.integers(1, 999)
decimals = st.one_of(st.just(""), st.integers(0, 10**6).map(lambda digits: f".{digits}"))


@st.composite
def notations(draw: st.DrawFn) -> tuple[str, Fraction]:
    """Draw a number without a sign: its text in one of the documented notations, and its value."""
    whole, end = draw(wholes), draw(decimals)
    plain = Fraction(f"{whole}{end}")
    over, under, exponent = draw(small), draw(small), draw(st.integers(-30, 30))
    fractions = [
        f"{over}/{under}",
        f"{over} / {under}",
        f"{over}\u2044{under}",
        *(f"\\{command}{{{over}}}{{{under}}}" for command in ("frac", "dfrac", "tfrac")),
    ]
    if over < 10 and under < 10:
        fractions += [f"\\frac{over}{under}", f"\\frac{over}{{{under}}}", f"\\dfrac{{{over}}}{under}"]
    fraction = draw(st.sampled_from(fractions))
    scientific = [
        f"e{exponent}",
        f"E{exponent:+d}",
        f" x 10^{exponent}",
        f"×10{superscript(exponent)}",
        f" \\times 10^{{{exponent}}}",
        f"\\cdot10^{{{exponent}}}",
        f" · 10^{exponent}",
        f"*10**{exponent}",
    ]
    vulgar = draw(st.sampled_from(VULGAR))
    return draw(
        st.sampled_from(
            [
                (f"{whole}{end}", plain),
                (f"{whole:,}{end}".replace(",", draw(st.sampled_from(MARKS))), plain),
                (indian(whole) + end, plain),
                (full_width(f"{whole:,}{end}"), plain),
                (fraction, Fraction(over, under)),
                (f"{whole} {fraction}", whole + Fraction(over, under)),
                (f"{whole}{fraction}", whole + Fraction(over, under))
                if fraction.startswith("\\")
                else ("1", Fraction(1)),
                (vulgar, vulgar_value(vulgar)),
                (f"{whole}{vulgar}", whole + vulgar_value(vulgar)),
                (f"{whole} {vulgar}", whole + vulgar_value(vulgar)),
                *((f"{over}{end}{power}", Fraction(f"{over}{end}") * Fraction(10) ** exponent) for power in scientific),
                (f"10^{exponent}", Fraction(10) ** exponent),
                (f"10{superscript(exponent)}", Fraction(10) ** exponent),
                (f"{under}^{{2}}", Fraction(under) ** 2),
            ]
        )
    )


def indian(whole: int) -> str:
    text = str(whole)
    head, tail = text[:-3], text[-3:]
    pairs = [head[max(0, end - 2) : end] for end in range(len(head), 0, -2)][::-1]
    return ",".join([*pairs, tail])


def vulgar_value(character: str) -> Fraction:
    """Return the value of a fraction that is one character. It is parsed from the character's Unicode name, such as
    VULGAR FRACTION THREE QUARTERS."""
    words = ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN")
    parts = {
        "HALF": 2,
        "THIRD": 3,
        "QUARTER": 4,
        "FIFTH": 5,
        "SIXTH": 6,
        "SEVENTH": 7,
        "EIGHTH": 8,
        "NINTH": 9,
        "TENTH": 10,
    }
    over, under = name(character).removeprefix("VULGAR FRACTION ").split()
    return Fraction(words.index(over) + 1, parts[under if under in parts else under.removesuffix("S")])


@settings(max_examples=300, deadline=None)
@given(
    notation=notations(),
    sign=signs,
    percent=st.sampled_from(["", "", "", "%", " %", "\\%", "％"]),
    currency=st.sampled_from(["", "", "", "$", "\\$", "€", "£ "]),
    before=st.sampled_from(BEFORE),
    after=st.sampled_from(AFTER),
)
def test_formatted_numbers_are_read_back(
    notation: tuple[str, Fraction], sign: tuple[str, int], percent: str, currency: str, before: str, after: str
) -> None:
    text, value = notation
    written = f"{sign[0]}{currency}{text}{percent}"
    expected = pytest.approx(float(value * sign[1] * (Fraction(1, 100) if percent else 1)), rel=1e-12)
    assert last(f"{before}{written}{after}") == expected, ascii(written)
    assert last(f"$3$ or 7, then {before}{written}{after}") == expected
    assert read_number(f"{before.replace('2024', 'year')}{written} of 3", "first", 0.01) == expected or "2024" in before
    assert read_number(f" {written}. ", "only", 0.01) == expected


@settings(max_examples=200, deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_back(value: float) -> None:
    for text in (repr(value), f"{value:.17e}", f"{value:.17E}", f"x = {value!r}", f"${value!r}$"):
        assert last(text) == value


READ = {
    # exponents of units and variables are not numbers
    "9.8 m/s^2": 9.8, "42 cm^3": 42, "5 kg m^-2": 5, "5 s^{-1}": 5, "5 m²": 5, "5 s⁻¹": 5, "9.8 m/s**2": 9.8,
    "5 m^(-2)": 5, "10^(3)": 1000, "1.5 × 10^3 kg/m^3": 1500, "9.8 m·s⁻²": 9.8, "5 \\mathrm{m\\,s^{-2}}": 5,
    "30^\\circ": 30, "30^{\\circ}C": 30, "5^{th}": 5, "5^{\\text{th}}": 5, "x^2 = 4": 4,
    "10^3 m": 1000, "2^0.5": 2**0.5,
    # fractions
    r"2\frac{3}{4}\text{ cm}^2": 2.75, r"-2\frac34": -2.75, r"2\,\frac{3}{4}": 2.75, r"\frac{-3}{4}": -0.75,
    "−2½": -2.5,    "1 1/2 cups": 1.5, "3/4 m^2": 0.75, r"\frac{1,000}{4}": 250,
    # a minus touches its number and nothing before it
    "- 5": 5, "Answer: - 5": 5, "– 5": 5, "— 5": 5, "—5": 5, "* 5": 5, "• 5": 5, "- -5": -5, "--5": 5, "Answer–5": 5,
    "Answer:-5": -5, "(-5)": -5, "-$5": -5, "$-5": -5, "5-7": 7, "5–7": 7, "5 - 7": 7, "5%-10%": 0.1, "-5–-3": -3,
    "约为-5度": -5, "\\text{answer: }-5": -5,
    # digits that spaces group, and those that they do not
    "1 000/4": 250, "1 234 567/2": 617283.5, "2024 100 000": 1e5,
    "1 234 5": 5, "in 2024 300 cups": 300, "1 100/200": 1.5, "3.141 592 65": 3.14159265, "5\n000": 0,
    "12 345 cups": 12345, "5 1234": 1234, "12,34": 34, "1,2,3": 3, "3,14": 14,
    # markup
    "is **5**": 5, "is**5**": 5, "_5_": 5, "\\(5\\)": 5, "\\boxed{5}": 5, "\\approx5": 5, "`5`": 5,
    # several numbers
    "10:30": 30, "2024-05-06": 6, "5/6/2024": 2024, "1. cat\n2. dog": 2, "5 cups in 2024": 2024, "3 x 4": 4,
    "5 cm x 10 cm": 10, "is 5...": 5, "...7": 7, "x_{12} = 3": 3, "\u200e-5": -5, "12 percent": 12, "5 million": 5,
    "42 ± 0.5": 0.5, "Rs.500": 500, "No.42": 42, "Fig.3": 3,
    # other signs of multiplication
    "3 X 10^8": 3e8, "3 ✕ 10^8": 3e8, "3 ∙ 10^8": 3e8, "3∗10^8": 3e8,
}  # fmt: skip
UNREAD = [
    "", "cat", "1.2.3", "v1.2.3", "x2", "x_1", "H₂O", "x^2", "m^{-2}", "1/0", "0^-1", "10^9999", "9^9999", "1e999",
    "NaN", "inf", "9" * 400,
]  # fmt: skip


@pytest.mark.parametrize("text", READ, ids=ascii)
def test_reads_last_number(text: str) -> None:
    assert last(text) == pytest.approx(READ[text], rel=1e-12)


@pytest.mark.parametrize("text", UNREAD, ids=lambda text: ascii(text)[:20])
def test_rejects_texts_that_are_not_numbers(text: str) -> None:
    assert last(text) is None


@pytest.mark.parametrize("text", ["- 5", "5 cm", "5 and 6", "5-7", "3,14", "(5)"])
def test_take_only_rejects_surrounding_text(text: str) -> None:
    assert read_number(text, "only", 0.01) is None


def test_documentation_names_every_notation() -> None:
    section = PAGE.partition("### What `number` reads")[2].partition("\n## ")[0]
    examples = [
        each for row in section.splitlines() if row.startswith("| ") for each in row.split("|")[2].split("`")[1::2]
    ]
    values = [
        each for row in section.splitlines() if row.startswith("| ") for each in row.split("|")[3].split("`")[1::2]
    ]
    assert len(examples) == len(values) > 20
    for example, value in zip(examples, values, strict=True):
        assert last(example) == pytest.approx(float(value), rel=1e-12), example


@pytest.mark.parametrize("piece", ["1,", "-", "1 234 ", "\\frac", "x^{", "²", "1.234 567 ", "_{", "1/"])
@pytest.mark.timeout(20)
def test_long_completions_are_graded_in_seconds(piece: str) -> None:
    last(piece * (300_000 // len(piece)))
