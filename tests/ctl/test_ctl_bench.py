# SPDX-License-Identifier: Apache-2.0
"""`pvrctl bench text`: its texts, the table, and what it asks the daemon."""

from __future__ import annotations

import pytest

from pvrd.ctl import bench_text


@pytest.mark.parametrize("tokens", [1, 2, 5, 128])
def test_texts_have_the_tokens_asked_for_and_nothing_in_common(tokens: int) -> None:
    def words(text: str) -> int:
        return len(text.split())

    def letters(text: str) -> int:
        return len(text.replace(" ", ""))

    texts = [bench_text.text_of(words, tokens, seed) for seed in (1, 2)]
    assert [words(text) for text in texts] == [tokens, tokens]
    assert texts[0].split()[0] != texts[1].split()[0]
    assert letters(bench_text.text_of(letters, tokens, 1)) == tokens


def test_a_vocabulary_of_bytes_gets_nearly_as_many() -> None:
    text = bench_text.text_of(len, 128, 3)
    assert 126 < len(text) <= 128


@pytest.mark.bus
def test_the_table(fake) -> None:
    done = fake.run("bench", "text", "-p", "4", "-n", "16", "-r", "2", "--device", "cpu")
    assert (done.code, done.err) == (0, "")
    assert done.text == (
        "| model |   size |   params | backend | test |         t/s |\n"
        "| ----- | -----: | -------: | ------- | ---: | ----------: |\n"
        "| echo  | 1.0 MB | 135.00 M | gpu     |  pp4 | 8.00 ± 0.00 |\n"
        "| echo  | 1.0 MB | 135.00 M | gpu     | tg16 | 4.00 ± 0.00 |\n"
        "\n"
        "on Fake GPU\n"
    )
    assert fake.expect("options") == {"device": "cpu", "context": 88}


@pytest.mark.bus
def test_json(fake) -> None:
    record = fake.run("bench", "text", "--json", "-p", "0", "-n", "8", "-r", "3").json
    assert (record["model"], record["parameters"], record["device"]) == ("echo", 135_000_000, "gpu")
    assert record["tests"] == [
        {"test": "tg8", "tokens_per_s": 4.0, "sd": 0.0, "samples": [4.0, 4.0, 4.0]}
    ]


@pytest.mark.bus
def test_usage(fake) -> None:
    assert "asked for" in fake.run("bench", "text", "-p", "0", "-n", "0").failed(2)
    assert "bench text" in fake.run("bench").failed(2)
    assert fake.run("bench", "text", "-p", "many").code == 2
    assert "fake says" in fake.run("bench", "text", "--model", "UnknownModel").failed(5)
