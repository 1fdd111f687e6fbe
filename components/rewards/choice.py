r"""A reward for multiple choice: find the letter that a completion chooses.

A letter that stands alone is a label. Labels joined by "or", "and", a comma and the like form one list. A list is

- declared: "the answer is B", "B is correct", "I choose B", \boxed{B}, "B." at the start, "So B." at the end, or a line
  that holds nothing else;
- rejected: "not B", "B is wrong";
- or mentioned, in all other cases: "option C shows a dog".

The last declared list is the choice. If none is declared and exactly one label is mentioned, that label is the choice.
A list of two different letters is not a choice.
"""

from __future__ import annotations

import re
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from pydantic import Field

from armature.components.contracts.value_text import plain_number
from armature.components.rewards.reward import BadAnswer, ExtractingSettings, Reward, RewardInput, extracted, folded


def _words(spaced: str, unspaced: str = "") -> str:
    """Return a regular expression that matches any of the words. Words are separated by spaces; `_` in a word stands
    for a space.

    Args:
        spaced: words that match only as whole words.
        unspaced: words of languages without spaces, which match anywhere.
    """
    whole = "|".join(spaced.split()).replace("_", r"\s")
    return rf"(?:\b(?:{whole})\b{''.join(f'|{word}' for word in unspaced.split())})"


# Words in English, German and Chinese. The patterns run on the output of `_with_labels`, where labels are the only
# upper-case letters: ASCII if the completion has a capital, full-width if it has a lower-case letter, and _SEVERAL for
# a list of two letters.
_SEVERAL = "Ω"
FULL_WIDTH = 0xFEE0
"""Offset from an ASCII character to its full-width form."""
_LABEL = f"[A-Z\uff21-\uff3a{_SEVERAL}]"
_ANSWER = _words("answers? ans corrections? solution conclusion guess vote antwort lösung", "答案 结论 結論")
_OPTION = _words("option choice selection pick wahl letter", "选项 選項")
_GOOD = _words("final correct right best my richtige korrekte", "正确 正確")
_IS = _words("is are be was ist lautet wäre", r"[应應]?[该該]?[是为為选選] [:=?→] -+>?")
_CHOOSE = _words(
    "choos(?:e|ing) chose pick(?:ed|ing)? select(?:ed|ing)? (?:go|going|went)_(?:with|for) vote_for opt_for prefer"
    " settle_on nehme wähle",
    "[选選][择擇]?(?![项項])",
)
_SUPPOSE = _words(
    "think believe guess say suppose denke glaube sage"
    " (?:it|that|this|es)(?:'s|_(?:is|ist|(?:must|should|would|will|has_to)_be))",
    "认为 認為 觉得 覺得 是",
)
_VERB_OF_I = r"\s+" + _words(
    "think believe guess suppose assume say feel know would will could should can cannot must may might am was have had"
    " do did see saw choose chose pick select go went conclude prefer need want find found just also really personally"
    " honestly still now first"
)
_FILLER = "|".join(
    (
        rf"\bi(?={_VERB_OF_I})",
        _words(
            "we i'd i'll i'm would will must should think believe say suppose that it it's is be the this one likely"
            " probably most clearly definitely certainly obviously actually indeed just simply surely either both"
            " between all maybe perhaps possibly therefore thus hence so finally wait no yes well ok okay then to go"
            " with for number in opinion labell?ed ich denke glaube würde es also wohl die vermutlich wahrscheinlich"
            " eindeutig daher entweder",
            "我 认为 認為 觉得 覺得 [应應][该該] 可能 大概 [是为為选選] 所以 因此",
        ),
        *(_ANSWER, _OPTION, _GOOD),
    )
)
_FILLERS = rf"(?>(?:(?:{_FILLER})\W{{0,4}}){{0,8}})"
_NOT = _words(
    r"not never cannot neither nor except without unlike than if whether unless instead_of (?:all|every\w*|any\w*)_but"
    " (?:rul|eliminat|exclud|reject|dismiss)(?:e|es|ed|ing)(?:_out)?"
    r" mistake second (?:many|some|others)(?:_people)?(?:_(?:may|might|would|could))?"
    r"_(?:say|think|choose|pick|select|believe)"
    r" (?:chang|switch|revis)\w*(?:\s\w+){0,3}_from nicht weder noch kein statt außer ob wenn"
    " n'est_pas no_es não_é non_è не",
    r"n't\b 不\w{0,4} 非 排除 除",
)
_UNSPACED_SUBJECT = r"[)\"]?\s?(?:选项|選項|[项項])?[都也]?"
_RIGHT = (
    r"(?:[^\w\n]{0,4}\s(?:is|are|seems?|looks?|(?:must|should|would|has to) be|ist|sind|wäre)\s"
    r"(?:(?!not\b|nicht\b)\w+\s){0,3}?(?:correct|right|best|true|answer|antwort|richtig|korrekt)\b|\s+stimmt\b"
    r"|\s(?:fits|matches|remains|is left)(?=\s?(?:[.!]|\Z))"
    rf"|{_UNSPACED_SUBJECT}[是为為]?(?:最?正[确確]|答案|[对對](?![应應比])))"
)
_WRONG = (
    r"(?:\s(?:(?:is|are|was|were|do|does|did|can|could|would|ist|sind|kann)(?:n't\b|\s(?:\w+\s)?"
    r"(?:not|wrong|incorrect|false|impossible|out|nicht|falsch)\b)|cannot\b|can't\b"
    r"|(?:can|must|should) be (?:ruled|eliminated|excluded|rejected|dismissed)|n'est pas|no es|não é|non è)"
    rf"|{_UNSPACED_SUBJECT}(?:不|是?[错錯]))"
)
_VERB = (
    r"(?:\s(?:(?!(?:as|plus|this|thus|perhaps|always|besides)\b)[a-z]+s(?:n't)?|would|could|might|did|that|which|who)\b"
    r"|\s?[错錯不是有显顯])"
)
"""Pattern of a verb after a label. With such a verb, the label is the subject of a new clause and not a choice."""
_OR = _words(
    "or nor and/or or_else vs versus through thru oder noch bis ou o", "或者 或 还是 還是 和 与 與 及 以及 到 至"
)
_AND = _words("and plus but_also also as_well_as (?:along|together)_with und als_auch sondern_auch et y")
_MAYBE = rf"(?:{_words('maybe perhaps possibly even also the')}\s|{_OPTION}\s?|[选選]\s?)"

# Patterns that run on the completion itself, in its own case.
_MARKS = re.compile(r"(\*{1,3}|_{1,3}|`|\$|\")([A-Za-z])\1|(?<!\w)(')([A-Za-z])'(?!\w)|[\[{<]\s?([A-Za-z])\s?[\]}>]")
"""Pattern of a single letter with markup around it, such as **B**. The markup is replaced by parentheses."""
_TEXT_COMMANDS = re.compile(r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt|cal)?|operatorname|bf|rm|emph)\b\s?|\\(?=[()\[\]])")
_BOXES = re.compile(r"(?:\\|\x08|\b)(?:boxed|fbox)(?![a-z])")
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~|<del>[^<>]{0,200}</del>")
_TAGS = re.compile(r"</?(?:[A-Za-z_][\w.-]{1,63}|[a-z])>|<\|[^<>|]{1,64}\|>")
_EMPHASIS = re.compile(r"[*`$]|(?<![^\W_])_+|_+(?![^\W_])|(?<=\n)[#>]+")
_BOX, _TAG = "\x02", "\n\f"
_PUNCTUATION = str.maketrans({"。": ".", **dict.fromkeys("“”„«»「」『』", '"'), **dict.fromkeys("\u2013\u2014", " - ")})
_LETTER = re.compile(
    r"(?<![\w'°\\])(?<!\w-)(?<![A-Za-z0-9_]\()(?<![A-Za-z]\.)[A-Za-z]"
    r"(?![\w'#]|-\w|\(\w\)|\s?[=^]|\+(?!\s?[A-Za-z]\b)|\.[A-Za-z](?![A-Za-z]))"
)
_WORD = re.compile(
    r"[ \t]+(?!(?:is|are|or|and|nor|plus|together|because|since|as|but|not|for|if|which|with|seems|fits|matches|shows"
    r"|looks|has|does|depicts|describes|represents|contains|makes|remains|only|rather|instead|over|through|to|versus"
    r"|was|would|could|should|must|may|might|cannot|can (?:be|not)|doesn|isn|correct\W*$|ist|sind|als|oder|und|weil|da"
    r"|denn|zeigt|ou|et|hoặc|veya|atau|lub|eller|est|es|no es)\b)[A-Za-zÀ-ɏ]{2}",
    re.IGNORECASE | re.MULTILINE,
)
"""Pattern of a word after the letter "a" or "I" that shows that the letter is the article or the pronoun, not a
label."""
_PRONOUN = re.compile(_VERB_OF_I, re.IGNORECASE)
_SENTENCE_START = re.compile(r"[.!?:;\n\f\"()-][^\w\n]*\Z")

_ANNOUNCED = (
    rf"(?:(?:(?<!wrong )(?<!other )(?<!false )(?<!incorrect )(?:{_ANSWER}|{_OPTION})"
    rf"(?:[\s,]+(?!(?:not|cannot|never|nicht|is|are|be|was|ist|answer)\b)[^\W\d_]{{2,}}){{0,6}}?\W{{0,4}}{_IS}"
    rf"|{_GOOD}\s(?:{_ANSWER}|{_OPTION})|{_ANSWER}\W{{0,3}}\n|答案|{_CHOOSE}|{_BOX})\W{{0,8}}{_FILLERS})"
)
_ANNOUNCED_WORD = re.compile(rf"{_ANNOUNCED}(?=[AI]\b)", re.IGNORECASE)
_ITEM = r"[^\w\n]{0,8}(?:\d{1,2}[.)]\s)?"
_LIST = re.compile(
    rf"\A\W*(?:{_OPTION}\s)?{_LABEL}(?:\W+(?:{_OPTION}\s)?{_LABEL})+\W*\Z"
    rf"|{_LABEL}(?:{_RIGHT})?[^\w\n]{{1,3}}(?:(?:{_AND}|{_OR})\s)?(?:{_OPTION}\s)?{_LABEL}"
    rf"(?=\s(?:is|could be|seems) also\b|{_RIGHT}\s(?:too|as well)\b)"
    rf"|{_LABEL}{_RIGHT},?\s(?:{_AND}|{_OR})\s(?:{_OPTION}\s)?{_LABEL}(?={_RIGHT})"
    rf"|{_LABEL}(?:(?:"
    rf"\W{{0,6}}{_MAYBE}?{_OR}\W{{0,6}}{_MAYBE}{{0,2}}[^\w\s]{{0,4}}{_LABEL}"
    rf"|(?:[^\w\s]{{0,4}}\s{_AND}\s|[)}}\"]{{0,3}}\s{{0,2}}(?:[,;/&|+、]|-\s)\s{{0,2}}(?:(?:{_AND}|{_OR})\s)?"
    rf"|[)}}\"]{{0,3}}[ \t]?){_MAYBE}{{0,2}}[^\w\s]{{0,4}}{_LABEL}(?:(?={_RIGHT})|(?!{_VERB}))"
    rf"))+"
    rf"|^{_ITEM}{_LABEL}[^\w\n:]{{0,8}}(?:\n{_ITEM}{_LABEL}[^\w\n:]{{0,8}})+$",
    re.MULTILINE,
)
_LAST_OF_LIST = re.compile(rf"(?:{_OR}|{_AND})\s{_LABEL}\W{{0,3}}[,;:]\s({_LABEL})\Z")
_IS_RIGHT = re.compile(_RIGHT)
_VERDICT = re.compile(
    rf"({_LABEL})[^A-Z\uff21-\uff3a{_SEVERAL}\n]{{0,60}}?"
    rf"(?:(?:(?<={_LABEL})\s|[^\w\s]\s{{0,2}})(?:(?:this|that|it) is )?"
    r"(?:(correct|right|true|yes|richtig|korrekt|正[确確]|[对對])"
    r"|(?:not |in)(?:correct|right|true)|wrong|false|no|falsch|[错錯][误誤]?|不[对對]|不正[确確])"
    r"(?=\s?(?:[-.,;:!|)]|\n|\Z|because|since|as|weil|da|因))|\s?(?:([✓✔✅☑])|[✗✘❌✖☐]))"
)
"""Pattern of a verdict on a label, as in "A: wrong, B: right". "B: Right" alone is not a verdict, because "Right" may
be the text of option B."""
_MARKED = re.compile(rf"^[^\w\n]{{0,3}}(?:([✓✔✅☑])|[✗✘❌✖☐])\s?(?:{_OPTION}\s)?({_LABEL})", re.MULTILINE)
_ALL_BUT = re.compile(
    rf"\b(?:all|every\w*|any\w*)\b[^.!?\n]{{0,30}}?\b(?:but|except(?: for)?|other than)\s(?:{_OPTION}\s)?"
    rf"({_LABEL})\W{{0,3}}\s(?:is|are)\s(?:wrong|incorrect|false|ruled out|eliminated)"
)
_ASKED = re.compile(
    rf"(?:^|[.!?])\W{{0,4}}(?:is|could|can|would|might|should|what about|how about|ist)\b"
    rf"[^.!?\n]{{0,60}}{_LABEL}\W{{0,3}}\?",
    re.MULTILINE,
)
_OPTION_TEXT = re.compile(
    rf"({_LABEL})(?:(\W{{1,4}}(?:both|either|neither|all of)\s)({_LABEL}\W.{{0,20}}{_LABEL})"
    rf"|(\)?[.:]?\s\(?)({_LABEL}(?:,\s{_LABEL})*,?\sand\s{_LABEL})(?=\)?(?:\sonly)?\W{{0,4}}$))",
    re.MULTILINE,
)
"""Pattern of an option whose text names other labels, such as "D. Both A and B" or "D. A and B"."""
_REJECTED = re.compile(
    rf"{_NOT}(?:\s(?!(?:but|sondern|so|therefore|hence|because|since|answer|antwort)\b)[^\W\d_]{{2,}}(?:'s)?){{0,3}}"
    rf"[^\w.,;!?\n]{{0,4}}{_LABEL}|{_LABEL}{_WRONG}"
)
_DECLARED = re.compile(
    rf"{_ANNOUNCED}(?P<announced>{_LABEL})"
    rf"|{_SUPPOSE}\W{{0,4}}{_FILLERS}(?P<supposed>{_LABEL})(?!{_VERB})"
    rf"|(?P<confirmed>{_LABEL}){_RIGHT}"
    rf"|^[^\w\n]{{0,8}}(?P<line>{_LABEL})[^\w\n:]{{0,8}}$"
    rf"|(?:\A|\f)\W{{0,8}}{_FILLERS}(?P<first>{_LABEL})"
    r"(?=[)}\"]{0,3}(?:\s?[.,:;!?)(-]|\s(?:because|since|as|weil|da|denn|因)|\Z))"
    rf"|(?:^|[.!?,;])\W{{0,8}}(?!{_OPTION})(?={_FILLER}){_FILLERS}(?P<concluded>{_LABEL})\W{{0,40}}\Z"
    rf"|(?<!fig)(?<!e\.g)(?<!i\.e)[.!?,;][^\w\n]{{0,8}}(?P<last>{_LABEL})(?:(?<![AI])|(?=\W))\W{{0,40}}\Z",
    re.MULTILINE,
)
_ITEMS = re.compile(rf"(?:^[^\w\n]{{0,8}}|[,;]\s)({_LABEL})[)}}.:]", re.MULTILINE)


class ChoiceSettings(ExtractingSettings):
    """The reward is 1 if the completion chooses the letter of the answer, else 0."""

    choices: int = Field(4, ge=2, le=26)
    """Number of options: 4 for A to D."""


class Choice(Reward[ChoiceSettings]):
    r"""Grade the chosen letter: B, (B), "B. because ...", "the answer is B", \boxed{B}. Two letters are not a choice.

    The answer is a letter, or the option's index counted from 0.
    """

    Settings: ClassVar = ChoiceSettings

    def __init__(self, settings: ChoiceSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._letters = ascii_uppercase[: settings.choices]

    def check(self, answer: Any) -> None:
        self._right(answer)

    def grade(self, inputs: RewardInput) -> float:
        right = self._right(inputs.answer)
        text = extracted(inputs.completion, self._settings.extract)
        return float(text is not None and chosen_letter(text, self._letters) == right)

    def _right(self, answer: Any) -> str:
        if isinstance(answer, float):
            answer = plain_number(answer)
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(self._letters):
            return self._letters[answer]
        letter = chosen_letter(answer, self._letters) if isinstance(answer, str) else None
        if letter is None:
            raise BadAnswer(
                f"{answer!r:.200} is not one of the letters {self._letters} or an index below {len(self._letters)}"
            )
        return letter


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the upper-case letter that `text` chooses, or None if it chooses no letter or several. Takes linear time.

    Example:
        >>> chosen_letter("A is tempting, but the answer is (b).", "ABCD")
        'B'
        >>> chosen_letter("A or B", "ABCD") is None
        True
    """
    text = _judged(_with_labels(text))
    text = _LIST.sub(_joined, _OPTION_TEXT.sub(_without_text, text))
    text = _ASKED.sub(lambda match: folded(match.group()).lower(), text)
    text = _REJECTED.sub(lambda match: folded(match.group()).lower(), text)
    enumerated = [folded(letter) for letter in _ITEMS.findall(text)][:2] == ["A", "B"]
    declared = [
        match[match.lastgroup]
        for match in _DECLARED.finditer(text)
        if match.lastgroup is not None
        and not (enumerated and match.lastgroup == "first" and not re.search(r"\w", match.group()[:-1]))
    ]
    if declared:
        letter = folded(declared[-1])
        return letter if letter in letters else None
    for pattern in (rf"\(({_LABEL})\)", f"[A-Z{_SEVERAL}]"):
        mentioned = {folded(letter) for letter in re.findall(pattern, text)} & {*letters, _SEVERAL}
        if mentioned:
            return mentioned.pop() if len(mentioned) == 1 and _SEVERAL not in mentioned else None
    return None


def _with_labels(text: str) -> str:
    """Remove markup from a text and convert it to lower case, except for its labels, which become upper-case letters.

    A label that is a capital in `text` becomes an ASCII letter, and other labels become full-width letters.
    """
    text = _BOXES.sub(_BOX, _TAGS.sub(_TAG, "\n" + _STRUCK.sub(" ", folded(text).translate(_PUNCTUATION))))
    text = _MARKS.sub(lambda match: f"({match[2] or match[4] or match[5]})", _TEXT_COMMANDS.sub("", text))
    text = _EMPHASIS.sub("", text)
    announced = {match.end() for match in _ANNOUNCED_WORD.finditer(text)}
    parts, end = [], 0
    for match in _LETTER.finditer(text):
        if not _is_word(match, match.start() in announced):
            letter = match.group()
            letter = letter if letter.isupper() else chr(ord(letter.upper()) + FULL_WIDTH)
            parts += [text[end : match.start()].lower(), letter]
            end = match.end()
    return "".join([*parts, text[end:].lower()]).strip(" \n")


def _is_word(match: re.Match[str], announced: bool) -> bool:
    """Return True if the matched letter is the article "a" or the pronoun "I" and not a label.

    `announced` is True if the words before it announce an answer.
    """
    letter, text, start, end = match.group(), match.string, match.start(), match.end()
    if letter not in "AaIi" or not _WORD.match(text, end):
        return False
    if letter == "A":
        return not announced and _SENTENCE_START.search(text, max(0, start - 8), start) is not None
    return letter == "a" or not announced or _PRONOUN.match(text, end) is not None


def _without_text(match: re.Match[str]) -> str:
    """Return the matched option with the labels in its text in lower case. So "D. Both A and B" has only the label
    D."""
    label, between, named = (group for group in match.groups() if group is not None)
    return match.group() if label in named else f"{label}{between}{named.lower()}"


def _judged(text: str) -> str:
    """Rewrite verdicts on two or more letters: "A: wrong, B: right" becomes "A is wrong, B is correct"."""
    text = _MARKED.sub(lambda match: f"{match[2]} is {'correct' if match[1] else 'wrong'}", text)
    verdicts = list(_VERDICT.finditer(text))
    if len({match[1] for match in verdicts}) > 1 or any(match[0][-1] in "✓✔✅☑✗✘❌✖☐" for match in verdicts):
        text = _VERDICT.sub(lambda match: f"{match[1]} is {'correct' if match[2] or match[3] else 'wrong'}", text)
    return _ALL_BUT.sub(r"\1 is correct", text)


def _joined(match: re.Match[str]) -> str:
    """Return the replacement of a matched list of labels: the label if all are equal, or else _SEVERAL."""
    last = _LAST_OF_LIST.search(match.group())
    if last and _IS_RIGHT.match(match.string, match.end()):  # "of A, B and C, B is correct"
        return f"{_SEVERAL}, {last[1]}"
    letters = {folded(letter) for letter in re.findall(_LABEL, match.group())}
    return letters.pop() if len(letters) == 1 else _SEVERAL
