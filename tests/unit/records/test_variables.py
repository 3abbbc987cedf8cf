"""How variables are written into records: credentials by name only."""

import pytest

from hpcenv.records.variables import WITHHELD, recorded_command, recorded_value


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "api_key"),
        *("DB_PWD", "SSH_PASSPHRASE", "AWS_CREDS", "secretKey"),
        *("PASS", "DB_PASS", "SMTP_PASS", "dbPass"),
    ],
)
def test_the_value_of_a_credential_is_not_recorded(name: str) -> None:
    assert recorded_value(name, "abc") == WITHHELD


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "PATH",
        "PWD",
        "OLDPWD",
        "PASSED",
        "SSH_ASKPASS",
        "BYPASS",
        "NUM_PASS",
    ],
)
def test_other_values_are_recorded(name: str) -> None:
    assert recorded_value(name, "abc") == "abc"


def test_a_password_in_a_url_is_not_recorded() -> None:
    assert recorded_value("https_proxy", "http://alice:pw@proxy:3128/") == "http://***@proxy:3128/"


def test_a_command_line_has_no_credentials() -> None:
    words = (
        "hpcenv",
        "submit",
        "t.py",
        "--env",
        "HF_TOKEN=abc",
        "--env=WANDB_API_KEY=x=y",
        "--env",
        "A=1",
        "--",
        "K=v",
    )
    assert recorded_command(words) == (
        *("hpcenv", "submit", "t.py", "--env", f"HF_TOKEN={WITHHELD}", f"--env=WANDB_API_KEY={WITHHELD}"),
        *("--env", "A=1", "--", "K=v"),
    )
