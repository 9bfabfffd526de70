"""``verl_precision/uv.py``: which uv is called, and with what settings of pip."""

import os

import pytest

from verl_precision import uv

LISTED = """\
global.cert='/etc/ssl/own.pem'
global.find-links='/wheels /more'
global.index-url='https://mirror/simple'
install.index-url='https://nearer/simple'
list.format='json'
:env:.default-timeout='180'
:env:.find-links='/wheels'
:env:.no-index='true'
"""
SETTINGS = {
    "cert": "/etc/ssl/own.pem",
    "index-url": "https://nearer/simple",
    "find-links": "/wheels",
    "timeout": "180",
    "no-index": "true",
}


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """A uv on PATH that prints its words and those of its environment that begin with UV_."""
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\necho words: $*\nenv | grep ^UV_\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in {*os.environ} - {"PATH", "HOME"}:
        if name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return program


def test_settings_of_pip_become_those_of_uv():
    assert uv.settings_of(LISTED) == SETTINGS
    assert uv.settings_of("global.find-links='/a /b'") == {"find-links": "/a,/b"}
    assert uv.settings_of("global.extra-index-url='https://a\\nhttps://b'") == {
        "extra-index-url": "https://a https://b"
    }


def test_uv_on_path_gets_pips_settings_where_its_own_are_not_set(on_path, monkeypatch, capfd):
    on_path.with_name("pip.conf").write_text(
        "[global]\nno-index = true\nindex-url = https://mirror/simple\ntimeout = 7\n"
    )
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "9")
    found = uv.find_uv()
    assert found.program == on_path
    found.pip("install", "six")
    words, *variables = capfd.readouterr().out.splitlines()
    assert words == "words: pip install six --no-index --quiet"
    assert {"UV_DEFAULT_INDEX=https://mirror/simple", "UV_HTTP_TIMEOUT=9", "UV_PYTHON_DOWNLOADS=never"} <= {*variables}
