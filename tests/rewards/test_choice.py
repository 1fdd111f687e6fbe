"""The chosen letter is read from every wording with every letter, in several languages and full-width characters."""

# ruff: noqa: RUF001

from __future__ import annotations

import time
from string import ascii_uppercase

import pytest

from armature.components.rewards.choice import chosen_letter

from .grading import graded

DECLARED = (
    "X", "(X)", "[X]", "X.", "X)", "**X**", "**X.** a cup", "`X`", "'X'", '"X"', "$X$", "“X”", "X. A dog on a mat",
    "X) a cup", "X: a cup", "X - a cup", "(X) a cup", "**(X)** A cup", "X, because it is red", "X because it is red",
    "X since nothing else is red, and Y is not", "X\nThe image shows a cup.", "X) because the sky is blue, not Y",
    "(X) fits, Y cup would not", "Option X", "option X.", "Option X: a cup", "Answer: X", "Answer:X", "ANSWER: X",
    "answer = X", "Answer: **X**", "**Answer**: X", "**Answer: X**", "Answer: (X) a cup", "Answer: X cup",
    "Answer: X is the only one with a cup", "Answer:\n\n- X", "Answer -> X", "Final answer - X", "Final answer (X)",
    "## Answer\nX", "The answer is X", "The answer is X.", "The answer is (X).", "The answer is: X",
    'The answer is "X".', "The answer is option X.", "The answer is choice (X), a cup.",
    "The answer is X because it is red.", "The answer is X cup", "The answer is most likely X.",
    "The answer is I think X.", "The answer would be X", "The answer must be X.", "The correct answer is X.",
    "The correct answer to the question is X.", "The correct option is X",
    "I believe the right option is X; option Y has the wrong color.", "My answer is X.", "My final answer: X",
    "Answer: I would say (X).", "Answer: I believe it is X", "I think X", "I think the answer is X", "I think it's X.",
    "I believe it is X", "I would say X", "I'd say (X).", "I choose X.", "I would pick X, not Y.", "I'll go with X.",
    "I select option X.", "It is X.", "It's X", "It must be X", "X is correct.", "X is the correct answer.",
    "X is the answer", "Option X is right.", "(X) is clearly the best choice.", "Y is wrong. X is correct.",
    "Y is not right, but X is right.", "It is not Y, the answer is X.", "Not Y. X.", "It can't be Y, so X.",
    "Y? No, X.", "Y or X? I would say X.", "The answer is not Y but X.", "I do not think it is Y. The answer is X.",
    "Answer: rules out Y, leaving X", "I first thought the answer is Y. No: the answer is X",
    "Answer: Y. After another look that is wrong.\nAnswer: X", "Answer: Y\nAnswer: X",
    "The answer is Y. Wait, no. It is X.", "The answer is X. Choice Y shows a dog instead.",
    "The answer is X. Y shows a dog.", "The answer is X, Y shows a dog.", "The answer is X and Y shows a dog.",
    "The answer is X, not Y.", "The answer is X, unlike option Y.", "The answer is X. I think option Y shows a dog.",
    "The answer is X (Y is a dog).",
    "The correct answer is X. Here is why: option Y is a dog. A dog is no cup. I see a cup.",
    "The answer is X because I computed the integral.", "Let us compare Y and X. Y is a dog.\n\nX",
    "Y) a dog\nX) a cup\nThe answer is X", "<think>The answer is Y, or is it not?</think>X",
    "<think>Maybe Y.</think>\n\nX. a cup", "<think>\nY or X\n</think>\n<answer>X</answer>", "Final answer: <b>X</b>",
    "X<|im_end|>", r"so \boxed{X}", r"\boxed{\text{X}}", r"\boxed{\textbf{(X) } 12}", r"\(\boxed{X}\)",
    r"Y or X? \boxed{X. a cup}", r"The answer is $\boxed{X}$, not Y", r"\boxed{12}, so the answer is X",
    r"\boxed{\langle h\rangle \ll 3}\n**Answer: X**", '{"answer": "X"}', '{"reasoning": "Y is a dog", "answer": "X"}',
    '```json\n{"choice": "X", "why": "A dog is no cup"}\n```',
    # Verdicts on several letters
    "Option Y: incorrect. Option X: correct.", "Option X: correct. Option Y: incorrect.",
    "- **Y**: Incorrect, the dog is brown.\n- **X**: Correct.",
    "Y: this is wrong because it is a cup.\nX: this is correct because it is a dog.", "Y: not correct. X: correct.",
    "Y: cup (incorrect)\nX: dog (correct)", "Y – wrong\nX – right", "(Y) incorrect, (X) correct",
    "Option Y: False. Option X: True.", "Y: no\nX: yes", "Y ✗\nX ✓", "Y. cup ❌\nX. dog ✅", "❌ Y\n✅ X",
    "Is it Y? No. Is it X? yes.", "Y? No. X? yes!", "Y: Falsch\nX: Richtig", "选项Y：错误。选项X：正确。",
    "All options except X are wrong.", "Everything but X is incorrect.", "Y can be ruled out. X remains.",
    "Among Y, C and X, X is correct.",
    # The text of an option is not a verdict
    "X: False", "X. No", "X: Wrong", "Answer: X: True", "A: True\nB: False\nAnswer: X",
    "The answer is X.\nA: wrong color.\nB: wrong shape.",
    # Corrections, and mentions after the answer
    "Answer: Y\nCorrection: X", "I change my answer from Y to X.", "~~Y~~ X", "The answer is X. See Fig. Y.",
    "The answer is X. A common mistake is to choose Y.", "The answer is X. Many people choose Y.", "I am not sure; X",
    "X rather than Y", "X instead of Y.", "X only", "boxed{X}",
    # German
    "Die Antwort ist X.", "Die richtige Antwort lautet X, nicht Y.", "Antwort: X", "Ich denke, X.", "Ich wähle X.",
    "X ist richtig.", "X, weil es rot ist. Y zeigt einen Hund.", "Nicht Y, sondern X.",
    # Chinese, simplified and traditional
    "答案是X", "答案是X。选项Y是一只狗。", "答案：X", "答案为（X）。", "答案X",
    "正确答案是X，不是Y。", "正确选项是X",
    "我认为答案是X", "我认为是X。", "我选X", "故选X。",
    "选择X", "应该选X", "选项X", "X是正确的", "X正确，Y错误。", "不是Y，是X。", "X。因为是红色的", "正確答案是X", "選X",
)  # fmt: skip
"""Completions that choose the letter X. Y stands for another letter."""

LOWER_CASE = (
    "x", "(x)", "x.", "x) a cup", "**x**", "Answer: x", "The answer is x.", "the answer is (x)", "The answer is x",
    "the answer is x because it is red", r"\boxed{x}", '{"answer": "x"}', "I choose x.", "x is correct",
    "option x", "choice x", "答案是x",
)  # fmt: skip

SEVERAL = (
    "X or Y", "X or Y.", "(X) or (Y)", "X. or Y.", "X) or Y)", "X, or maybe Y", "X or possibly Y", "X plus Y",
    "Not only X but also Y", "X together with Y", "X/Y", "X / Y", "X, Y", "X; Y", "X & Y", "X + Y", "X|Y", "X – Y",
    "X Y", "XY", "(X)(Y)", "X\nY", "(X)\n(Y)", "X and Y", "**X** and **Y**", '"X" and "Y"', "Both X and Y are correct",
    "Both X and Y", "Either X or Y is right.", "X or Y is correct", "X and Y are the right answers",
    "All of X, Y and X", "The answer is X or Y.", "The answer is either X or Y", "The answer is X, or Y.",
    "The answer is X and Y", "The answers are X and Y.", "The answer is option X or option Y", "Answer: X, Y",
    "Answer: X/Y", "Answer: X Y", r"\boxed{X, Y}", r"\boxed{X} or \boxed{Y}", r"\boxed{X} \boxed{Y}",
    '{"answer": ["X", "Y"]}', '{"answer": "X or Y"}', "I choose X or Y", "I think X or Y", "It is X or Y",
    "The answer is X. Or Y.", "<answer>X or Y</answer>", "X or Y? I cannot say.", "X. Y.", "X? Y?",
    "Option X. Option Y.", "1. X\n2. Y", "X through Y", "X(or Y)", "Answer: X or else Y", r"\boxed{X \text{ or } Y}",
    "X is correct and Y is correct.", "X is correct. Y is also correct.", "The answer is X. Y is also correct.",
    "X is correct, Y is correct too.", "选X或选Y", "X ou Y", "X oder Y", "Die Antwort ist X oder Y.",
    "Sowohl X als auch Y", "X und Y sind richtig", "X或Y",
    "答案是X或Y", "答案是X和Y", "答案：X、Y", "答案：X，Y", "X和Y都正确",
)  # fmt: skip

NOTHING = (
    "", "...", "cat", "A dog", "a dog", "A dog is shown.", "A Dog", "The answer is a dog", "the answer is a cup, so",
    "Answer: a dog", "It is a dog.", "I think it is a dog", "I see a dog.", "I think so", "I do not know", "Don't know",
    "None of the above", "I'm not sure", "It is not X", "not X", "The answer is not X.", "The answer cannot be X.",
    "The answer isn't X", "I don't think it is X.", "Neither X nor Y", "X is wrong", "X is not correct.",
    "I don't think it's X.", "Everything but X", "X can be ruled out.", "Is it X?", "X ✗", "X: wrong, E: wrong",
    "X n'est pas correct", "La respuesta no es X", "不是X", "不选X", "X不正确", "X是错误的", "Nicht X", "X ist falsch",
    "\\boxed{12}", "XXL", "X-ray", "f(x) = 3", "25 °C", "25℃", "X = 5", "X's", "U.S. flag",
)  # fmt: skip


def filled(wording: str, letter: str, other: str) -> str:
    return wording.translate({ord("X"): letter, ord("Y"): other})


def other_letter(letter: str) -> str:
    return "C" if letter == "B" else "B"


def full_width(text: str) -> str:
    return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)


@pytest.mark.parametrize("wording", DECLARED)
def test_reads_every_letter_in_every_wording(wording: str) -> None:
    wide = not any(markup in wording for markup in ("\\", "<", "```"))
    for letter in ascii_uppercase:
        text = filled(wording, letter, other_letter(letter))
        assert chosen_letter(text, ascii_uppercase) == letter, text
        if letter in "AI":
            assert chosen_letter(text, "ABCD") == (letter if letter == "A" else None), text
        if wide and letter in "ABI":
            assert chosen_letter(full_width(text), ascii_uppercase) == letter, full_width(text)
    assert chosen_letter(filled(wording, "C", "A"), "ABCD") == "C"


@pytest.mark.parametrize("wording", LOWER_CASE)
def test_reads_announced_lower_case_letters(wording: str) -> None:
    for letter in ascii_uppercase:
        text = wording if wording.startswith("\\") else wording.replace("x", letter.lower())
        text = text.replace("{x}", f"{{{letter.lower()}}}")
        assert chosen_letter(text, ascii_uppercase) == letter, text


@pytest.mark.parametrize("wording", SEVERAL)
def test_rejects_two_letters_as_a_choice(wording: str) -> None:
    for letter in ascii_uppercase:
        text = filled(wording, letter, other_letter(letter))
        assert chosen_letter(text, ascii_uppercase) is None, text
    for text in (filled(wording, "B", "A"), filled(wording, "B", "I"), full_width(filled(wording, "B", "C"))):
        assert "\uff3c" in text or "\uff1c" in text or chosen_letter(text, ascii_uppercase) is None, text


@pytest.mark.parametrize("wording", SEVERAL)
def test_reads_a_repeated_letter_as_one_choice(wording: str) -> None:
    if wording not in ("XY", "Not only X but also Y"):
        assert chosen_letter(filled(wording, "C", "C"), "ABCD") == "C"


@pytest.mark.parametrize("text", NOTHING)
def test_rejects_texts_without_a_choice(text: str) -> None:
    for letter in "XABCDI":
        assert chosen_letter(filled(text, letter, "D"), ascii_uppercase) is None, (letter, text)


def test_letter_beyond_the_options_is_not_replaced_by_a_mentioned_one() -> None:
    assert graded("choice", "The answer is E. Option B shows a dog.", "B") == 0.0
    assert graded("choice", "The answer is E. Option B shows a dog.", "E", choices=5) == 1.0


LONGER = {
    "Let me think. I see a dog in A, a cat in B. Since the question asks for the cat, B.": "B",
    "Looking at the options:\nA. cat\nB. dog\nC. cup\n\nThe image shows a cup. Therefore, the answer is C.": "C",
    "Looking at the options:\nA. cat\nB. dog\nC. cup\n\nThe image shows a cup. So C.": "C",
    "A. cat\nB. dog\nC. cup": None,
    "Choices: A, B, C, D": None,
    "The answer: B. Explanation: A is wrong because of the dog, C is wrong because of the cat.": "B",
    "I would eliminate A and B. Between C and D, C is better.": None,
    "A and B are incorrect, so C": "C",
    "Definitely not A. The answer has to be D": "D",
    "A and B are both possible, but C is correct": "C",
    "We can rule out A, B and D. This leaves C.": "C",
    "It is C that shows the dog. Therefore the answer is D": "D",
    "The answer is D: both A and B": "D",
    "D) Both A and B": "D",
    "D. A and B": "D",
    "(D) A and C only": "D",
    "The answer is D (A and B).": "D",
    "Answer: D. A, B and C": "D",
    "A: 5, B: 6, C: 7.": None,
    "A. Right atrium\nB. Left atrium\n\nThe answer is B": "B",
    "The answer is B. The cup is right.": "B",
    "Answer: C\n\nA: Incorrect\nB: Incorrect\nC: Correct": "C",
    "Final Answer: The final answer is B. I hope it is correct.": "B",
    "The answer is C. Option D": "C",
    "The answer is C. A": "C",
    "The answer is A) A dog": "A",
    "The answer is a) a dog": "A",
    "A: A dog": "A",
    "{'answer': 'C', 'confidence': 0.9}": "C",
    "综上所述，答案选B。": "B",
    "A选项错误，B选项正确": "B",
    "正确答案应为C，选项D错误": "C",
    "故答案为：A": "A",
    "A和B都不正确": None,
}


@pytest.mark.parametrize("text", LONGER)
def test_reads_choice_in_long_completions(text: str) -> None:
    assert chosen_letter(text, "ABCD") == LONGER[text]


@pytest.mark.parametrize("piece", ["A ", "answer is ", "B or ", "\n(", "选", ", "])
@pytest.mark.timeout(60)
def test_long_completions_are_graded_in_seconds(piece: str) -> None:
    start = time.process_time()
    chosen_letter(piece * (100_000 // len(piece)), "ABCD")
    assert time.process_time() - start < 2
