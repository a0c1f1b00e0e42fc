"""Names to directories, and the hub's ids fetched from a local stand-in of it."""

import builtins
import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

import punica_jax as pj
from punica_jax import HubError, cli
from punica_jax.hub import fetch_weights, local_dir
from tests.hub_server import serving


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving() as hub:
        hub.repos = {
            "org/tiny": {"main": checkpoint / "model"},
            "org/lora": {"main": checkpoint / "a", "v2": checkpoint / "b"},
        }
        yield hub


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """The hub, with an empty cache of its own."""
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server.requests.clear()
    server.gated, server.broken = set(), set()
    yield server
    huggingface_hub.close_session()


def safetensors_of(hub):
    """The requests so far for weights."""
    return [request for request in hub.requests if ".safetensors" in request]


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_a_directory_wins(tmp_path, monkeypatch, checkpoint, hub):
    shutil.copytree(checkpoint / "a", tmp_path / "org" / "lora")
    monkeypatch.chdir(tmp_path)
    assert str(local_dir("org/lora", "adapter")) == "org/lora"
    assert local_dir(checkpoint / "a", "adapter") == checkpoint / "a"
    assert hub.requests == []


def test_fetches_what_a_model_has(hub, checkpoint, tmp_path):
    repo = shutil.copytree(checkpoint / "model", tmp_path / "repo")
    (repo / "chat_template.jinja").write_text("{{ bos_token }}")
    (repo / "additional_chat_templates").mkdir()
    (repo / "additional_chat_templates" / "rag.jinja").write_text("rag")
    wanted = files(repo)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (repo / name).write_text("large")
    (repo / "original").mkdir()
    (repo / "original" / "consolidated.00.pth").write_text("large")
    hub.repos["org/full"] = {"main": repo}
    folder = local_dir("org/full", "model")
    assert files(folder) == wanted - {"model.safetensors"}
    assert safetensors_of(hub) == []
    fetch_weights("org/full", folder)
    assert files(folder) == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == (repo / name).read_bytes()
    hub.requests.clear()
    fetch_weights("org/full", folder)
    fetch_weights(repo, local_dir(repo, "model"))
    assert hub.requests == []


def write_index(folder, *names):
    weight_map = {f"tensor {name}": name for name in names}
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_weights_are_of_the_first_files_commit(hub, checkpoint, tmp_path):
    old = shutil.copytree(checkpoint / "model", tmp_path / "old")
    new = shutil.copytree(checkpoint / "model", tmp_path / "new")
    (new / "model.safetensors").write_bytes(b"newer")
    (old / "model.safetensors").rename(old / "model-1.safetensors")
    write_index(old, "model-1.safetensors")
    hub.repos["org/moving"] = {"main": old, "before": old}
    folder = local_dir("org/moving@main", "model")
    hub.repos["org/moving"]["main"] = new
    fetch_weights("org/moving@main", folder)
    assert files(folder) == files(old)
    name = "model-1.safetensors"
    assert (folder / name).read_bytes() == (old / name).read_bytes()


@pytest.mark.parametrize("shards", [0, 2, 6])
def test_a_cache_that_is_not_whole(hub, checkpoint, monkeypatch, shards):
    # As versions of huggingface_hub left it that kept no list of what there is.
    root = Path(constants.HF_HUB_CACHE) / "models--org--part"
    folder = root / "snapshots" / ("c" * 40)
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(folder.name)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / "model" / name, folder)
    names = [f"model-{i}.safetensors" for i in range(shards)]
    if shards:
        write_index(folder, *names)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_dir("org/part", "model") == folder
    missing = {
        0: "model.safetensors",
        2: "model-0.safetensors, model-1.safetensors",
        6: ", ".join(names[:4]) + " and 2 more",
    }
    with pytest.raises(HubError) as caught:
        fetch_weights("org/part", folder)
    assert str(caught.value) == (
        f"org/part: neither the hub nor its cache on this machine has {missing[shards]}"
        ", which a model needs (weights in other formats are not read): connect, or "
        "give a local directory"
    )
    for name in names or ["model.safetensors"]:
        (folder / name).write_bytes(b"weights")
    fetch_weights("org/part", folder)
    (folder / "config.json").unlink()
    with pytest.raises(HubError, match=r"org/part: neither .* has config.json, which"):
        pj.LLM("org/part")


def test_a_second_time_is_from_the_cache(hub):
    first = local_dir("org/lora", "adapter")
    assert sum("/resolve/" in request for request in hub.requests) >= 2
    hub.requests.clear()
    assert local_dir("org/lora", "adapter") == first
    # What the branch points at is asked again, the files are there.
    assert hub.requests == ["GET /api/models/org/lora/revision/main"] or (
        hub.requests == ["GET /api/models/org/lora"]
    )
    hub.requests.clear()
    commit = hub.commit("org/lora", "main")
    assert local_dir(f"org/lora@{commit}", "adapter") == first
    assert hub.requests == []


def test_revisions(hub, checkpoint):
    (name,) = {"adapter_config.json"} & files(checkpoint / "b")
    folder = local_dir("org/lora@v2", "adapter")
    assert (folder / name).read_bytes() == (checkpoint / "b" / name).read_bytes()
    with pytest.raises(HubError) as caught:
        local_dir("org/lora@v3", "adapter")
    assert str(caught.value) == (
        f"org/lora@v3: {hub.url}/org/lora has no branch, tag or commit 'v3'"
    )


def test_unreachable(hub, monkeypatch):
    folder = local_dir("org/lora", "adapter")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local_dir("org/lora", "adapter") == folder  # all of it is in the cache
    with pytest.raises(HubError) as caught:
        local_dir("org/other", "adapter")
    assert str(caught.value).startswith(
        "org/other: no such directory, http://127.0.0.1:9/org/other did not give the "
        "files, and not all of them are in the hub's cache: connect, or give a local "
        "directory ("
    )


def test_refused(hub, tmp_path):
    hub.gated = {"org/secret"}
    hub.broken = {"org/broken"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing")
    hub.repos["org/empty"] = {"main": tmp_path / "empty"}
    hub.repos["org/broken"] = hub.repos["org/lora"]
    texts = {
        "org/secret": "org/secret: the hub gives this adapter only to people who were "
        f"granted access: ask for it at {hub.url}/org/secret, then log in: hf auth "
        "login",
        "org/nobody": "org/nobody: no such directory, and no such adapter at "
        f"{hub.url}/org/nobody, or it is private: check the spelling, or log in: hf "
        "auth login",
        "org/empty": "org/empty: neither the hub nor its cache on this machine has "
        "adapter_config.json, adapter_model.safetensors, which an adapter needs "
        "(weights in other formats are not read): connect, or give a local directory",
    }
    for name, text in texts.items():
        with pytest.raises(HubError) as caught:
            local_dir(name, "adapter")
        assert str(caught.value) == text
    with pytest.raises(HubError, match=r"org/broken: .* did not give the files.*409"):
        local_dir("org/broken", "adapter")
    with pytest.raises(HubError, match="org/a--b failed: HFValidationError: "):
        local_dir("org/a--b", "adapter")


@pytest.mark.parametrize(
    "name",
    ["nothing", "./org/name", "a/b/c", "/no/such", "~/x", "org/name@", "x" * 5000],
)
def test_neither(hub, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError) as caught:
        local_dir(name, "model")
    assert str(caught.value) == (
        f"{name[:200]}: no such directory, and not the id of a model on the Hugging "
        "Face hub either (org/name or org/name@revision)"
    )
    assert hub.requests == []


@pytest.mark.parametrize("name", ["", None, 3, b"org/name"])
def test_no_names(hub, llm, name):
    text = f"must be a directory, or an id of the Hugging Face hub .* got {name!r}"
    with pytest.raises(HubError, match=f"^a model {text}"):
        pj.LLM(name)
    with pytest.raises(HubError, match=f"^an adapter {text}"):
        llm.load_adapter("x", name)
    assert hub.requests == []


def test_a_path_is_never_an_id(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match="org/lora: no such directory, and not the id"):
        local_dir(tmp_path.relative_to(tmp_path) / "org" / "lora", "adapter")
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="file: a model is a directory, this is a file"):
        local_dir("file", "model")
    assert hub.requests == []


def test_without_the_package(hub, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(HubError) as caught:
        local_dir("org/lora", "adapter")
    assert str(caught.value) == (
        "org/lora: no such directory, and fetching it from the Hugging Face hub needs "
        "huggingface_hub: pip install 'punica-jax[hub]'"
    )


def test_progress(hub, capfd):
    local_dir("org/lora", "adapter", progress=True)
    assert "Fetching 2 files" in capfd.readouterr().err
    shutil.rmtree(constants.HF_HUB_CACHE)
    local_dir("org/lora", "adapter")
    assert capfd.readouterr() == ("", "")


def test_adapters_of_the_hub(hub, llm):
    try:
        loaded = llm.load_adapter("fetched", "org/lora")
        assert loaded.report == llm.adapters["a"].report
        loaded = llm.load_adapter("fetched", "org/lora@v2")
        assert loaded.report == llm.adapters["b"].report
        with pytest.raises(HubError, match="no such adapter at"):
            llm.load_adapter("fetched", "org/nobody")
        assert llm.adapters["fetched"] == loaded
    finally:
        llm.unload_adapter("fetched")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory": 5}, "kv_memory = 5 is 0 bytes in whole pages"),
        ({"max_rank": 513}, "max_rank must be at most 512"),
        ({"adapters": ["a"]}, "adapters must map names to directories"),
        ({"adapters": {"a": "org/nobody"}}, "org/nobody: no such directory, and no "),
        ({"adapters": {"a": "org/lora@v2"}, "max_rank": 16}, "its rank is 20, above"),
    ],
)
def test_refused_before_weights_are_fetched(hub, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pj.LLM("org/tiny", progress=False, **options)
    assert any("config.json" in request for request in hub.requests)
    weights = "/org/tiny/resolve/.*safetensors"
    assert not [r for r in hub.requests if re.search(weights, r)]


def test_a_base_by_another_name(hub, checkpoint, tmp_path):
    path = shutil.copytree(checkpoint / "a", tmp_path / "a")
    fields = json.loads((path / "adapter_config.json").read_text())
    fields["base_model_name_or_path"] = "org/large"
    (path / "adapter_config.json").write_text(json.dumps(fields))
    text = "was trained on 'org/large', the base model is 'org/tiny'"
    with pytest.warns(UserWarning, match=text) as caught:
        fetched = pj.LLM("org/tiny", {"x": path}, max_seats=1, progress=False)
    with pytest.warns(UserWarning, match=text) as later:
        fetched.load_adapter("x", path)
    assert [Path(one.filename) for one in [*caught, *later]] == [Path(__file__)] * 2


@pytest.mark.slow
def test_the_command_line_takes_ids(hub, llm):
    words = "generate org/tiny hello --adapter a=org/lora --use a --max-new-tokens 1"
    result = CliRunner().invoke(cli.app, words.split())
    assert result.exit_code == 0, result.output
    greedy = pj.SamplingParams(max_new_tokens=1)
    assert result.stdout == llm.generate("hello", "a", greedy)[0].text + "\n"
    # A wrong adapter is found out before the weights are read.
    result = CliRunner().invoke(
        cli.app, "generate org/tiny hi --adapter a=org/nobody --use a".split()
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: org/nobody: no such directory, and no such")
