"""What looks like a credential, and what of a training project does not."""

from __future__ import annotations

import string
import time

import pytest

from hpcenv.records.variables import names_credential
from hpcenv.submission.credentials import arguments, is_named_like_one, line_of

# Made up, in parts, so that no scanner takes this file for a leak.
HF, GITHUB, AWS = "hf_" + string.ascii_letters[:34], "ghp_" + "a1" * 18, "AKIA" + "ABCDEFGH234567QR"


@pytest.mark.parametrize(
    "path",
    [
        *(".env", "conf/.env.local", "prod.env", ".netrc", ".npmrc", "deploy.pem", "server.KEY", "id_rsa", "id_ed25519.pub"),
        *("secrets.yaml", "conf/Secrets.toml", "my_secrets.json", "credentials.json", "aws-credentials", "gcp_credentials.json"),
        *("token", "hf_token.txt", ".vault-token", "api_key.txt", "kaggle.json", "service-account.json", ".aws/config"),
        *("secrets/prod.txt", "passwords.csv", "cert.p12", "terraform.tfvars"),
    ],
)  # fmt: skip
def test_names_of_files_that_usually_hold_credentials(path: str) -> None:
    assert is_named_like_one(path)


@pytest.mark.parametrize(
    "path",
    [
        *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json", "tokens.csv"),
        *("config.yaml", "train.py", "keys.txt", "environment.yml", "env.sh", "README.md", "secretary.txt", "monkey.txt"),
        *("vocab/token_counts.tsv", "password_strength.py", "key_metrics.csv", "requirements.txt", "params.envelope"),
    ],
)  # fmt: skip
def test_names_of_a_training_project(path: str) -> None:
    assert not is_named_like_one(path)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a.yaml", "hf_token: hf_AAA"),
        ("a.yaml", f"  token: {HF}"),
        ("a.yaml", "wandb_api_key: 0123456789abcdef0123456789abcdef01234567"),
        ("a.json", '{"a": 1, "db": {"password": "hunter22"}}'),
        ("a.ini", "password = hunter22"),
        ("a.sh", "export OPENAI_API_KEY=abcdefgh"),
        ("a.toml", "secret-key = 'abcdefgh'"),
        ("a.txt", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("a.txt", GITHUB),
        ("a.txt", f"x {AWS} y"),
        ("a.cfg", "url = postgres://alice:hunter22@db.example/x"),
        ("a.yaml", "token: 4f9a1c0b2d3e4f5a6b7c8d9e"),
        ("a.py", 'PASSWORD = "hunter22"'),
        ("a.py", 'PASS = "hunter2-long"'),
        ("a.yaml", "smtp_pass: hunter22"),
        ("a.py", 'headers = {"Authorization": "Bearer abcdefghijkl"}'),
        ("a.py", 'headers["Authorization"] = "Bearer abcdefghijkl"'),
        ("a.sh", "curl -H 'Authorization: Bearer abcdefghijkl' https://x.example"),
        ("a.py", "api_key: str = 'abcdefgh'"),
        ("a.py", f'login(token="{HF}")'),
        ("a.py", 'os.environ["HF_TOKEN"] = "hf_AAAA"'),
        ("a.py", 'client = Client(apiKey="abcdefgh")'),
        ("a.ipynb", "\"wandb.login(secret='abcdefgh')\\n\","),
    ],
)
def test_lines_that_look_like_a_credential(path: str, line: str) -> None:
    assert line_of(path, f"first: 1\n\n{line}\nlast: 2\n".encode()) == 3


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a.yaml", "tokenizer: meta-llama/Llama-3.1-8B"),
        ("a.yaml", 'pad_token: "<pad>"'),
        ("a.yaml", "eos_token: </s>"),
        ("a.yaml", "max_tokens: 4096000"),
        ("a.yaml", "use_auth_token: true"),
        ("a.yaml", "hf_token: ${oc.env:HF_TOKEN}"),
        ("a.yaml", "hf_token: null"),
        ("a.yaml", "api_key: <your key>"),
        ("a.yaml", "password: changeme"),
        ("a.yaml", "key: model.layers.0.self_attn.q_proj.weight"),
        ("a.yaml", "hf_token: /home/alice/.cache/token"),
        ("a.json", '{"bos_token": "<|begin_of_text|>", "key_dim": 12345678}'),
        ("a.toml", 'HF_TOKEN = "file:~/.hf_token"'),
        ("a.py", "hf_token = args.hf_token"),
        ("a.py", "password = getpass.getpass()"),
        ("a.py", "token = os.environ['HF_TOKEN']"),
        ("a.py", "key = jax.random.PRNGKey(0)"),
        ("a.py", 'TOKEN_VARIABLE = {"hf_token": "HF_TOKEN"}'),
        ("a.py", 'for key, value in state.items(): sort_key = "layer_norm_weight_12345678"'),
        ("a.py", '    password: str = ""'),
        ("a.md", "Set https://user:password@host/ in your proxy."),
        ("a.md", "secret: The confidential key of a key pair."),
        ("a.yaml", "bypass: everything"),
        ("a.yaml", "passes: forward-only"),
        ("a.yaml", "forward_pass: fused-kernel"),
        ("a.yaml", "DB_PASS: pass"),
        ("a.py", 'headers = {"Authorization": f"Bearer {token}"}'),
        ("a.py", 'headers = {"Authorization": "Bearer " + token}'),
        ("a.sh", "curl -H 'Authorization: Bearer $TOKEN' https://x.example"),
        ("a.md", "Authorization: Bearer YOUR_TOKEN"),
        ("a.md", "Authorization: Bearer authentication"),
        ("a.py", "# risk-" + "a1" * 20),
    ],
)
def test_lines_of_a_training_project(path: str, line: str) -> None:
    assert line_of(path, f"first: 1\n{line}\n".encode()) == 0


def test_binary_content_has_no_lines() -> None:
    assert line_of("a.npy", b"\0" + f"password = '{HF}'".encode()) == 0
    assert line_of("a.txt", b"\xff\xfe password = 'hunter22'") == 1


@pytest.mark.parametrize("piece", ["key=", "key: ", 'token = "', "a.b-c_", "://a:", "x" * 97 + ":", "eyJ", "sk-a1"])
def test_no_content_takes_long(piece: str) -> None:
    content = (piece * (1 << 20))[: 1 << 20].encode()
    began = time.process_time()
    line_of("a.txt", content)
    line_of("a.txt", content.replace(b"=", b"=\n"))
    assert time.process_time() - began < 15


def test_arguments_are_named_and_their_values_never() -> None:
    words = ["--lr", "1e-3", "--hf-token", "abcdef", "--password=hunter22", "wandb_api_key=abcdef", "--tokens", "4096"]
    assert arguments(words) == ("--hf-token", "--password", "wandb_api_key")
    assert arguments(["--name", HF, HF, f"x={HF}"]) == ("--name", "argument 3", "x")
    assert arguments(["--hf-token", "--resume", "--secret", "env:X", "--use-auth-token", "true", "--key", "4"]) == ()
    assert arguments(["--db-pass", "hunter2", "--num-pass", "1000", "--bypass", "hunter2"]) == ("--db-pass",)
    assert arguments(["--api-key"]) == arguments([]) == ()


def test_the_last_word_of_a_name_decides() -> None:
    assert names_credential("client.secretKey") and names_credential("HF_TOKEN") and names_credential("db-password")
    assert (
        not names_credential("password_length") and not names_credential("compass") and not names_credential("monkey")
    )
