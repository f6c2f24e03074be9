import pytest

from workers.log_lines import MAX_CAUSE, cause_of, names_a_cause, phase_of

ENGINE = "(EngineCore pid=12871) ERROR 11-30 20:25:27 [core.py:1510] "
API = "(APIServer pid=1) INFO 11-30 20:22:27 "
ENGINE_INFO = "(EngineCore pid=1273) INFO 11-30 21:54:13 "
WORKER = "(Worker pid=4535) ERROR 11-30 20:07:17 [multiproc_executor.py:1063] "


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        (API + "[model.py:733] Resolved architecture: LlamaForCausalLM", "reading the model (LlamaForCausalLM)"),
        ("(Worker pid=1) INFO 11-30 20:22:41 [cpu_model_runner.py:68] Starting to load model M...", "loading weights"),
        ("Loading safetensors checkpoint shards:  38% Completed | 3/8 [00:01<00:02, 2.1it/s]", "loading weights 3/8"),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%|█ | 7/67 [00:01<?]", "capturing graphs 7/67"),
        (ENGINE_INFO + "[model_runner.py:284] Loading model from scratch...", "loading weights"),
        (
            ENGINE_INFO + "[model_runner.py:305] Model loading took 12.91 GiB and 1.444550 seconds",
            "weights loaded (12.91 GiB)",
        ),
        (API + "[kv_cache_utils.py:2327] GPU KV cache size: 524,288 tokens", "KV cache of 524,288 tokens"),
        (ENGINE_INFO + "[model_runner.py:747] Graph capturing finished in 4 secs, took 0.89 GiB", "warming up kernels"),
        (
            ENGINE_INFO + "[core.py:340] init engine (profile, create kv cache, warmup model) took 32.60 s",
            "engine initialized",
        ),
        ("Fetching 10 files:  20%|██ | 2/10 [00:01<00:04]", "downloading 2/10 files"),
        (API + "[entry.py:140] Starting vLLM server on http://127.0.0.1:8106", "starting server"),
        ('INFO:     127.0.0.1:51460 - "GET /health HTTP/1.1" 200 OK', None),
    ],
)
def test_lines_of_a_start_announce_its_phase(line, phase):
    assert phase_of(line) == phase


def test_port_in_use():
    assert cause_of(["    sock.bind(addr)", "OSError: [Errno 98] Address already in use"]) == (
        "OSError: [Errno 98] Address already in use"
    )


def test_unknown_flag():
    lines = ["usage: vllm [-h] [-v]", "            ...", "vllm: error: unrecognized arguments: --frobnicate 1"]
    assert cause_of(lines) == "unrecognized arguments: --frobnicate 1"


def test_bad_value_of_a_flag():
    assert cause_of(["vllm serve: error: argument --dtype: invalid choice: 'float99'"]).startswith("argument --dtype")


def test_a_validation_error_is_told_by_its_own_text():
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, Sleep mode is not supported on current platform. [type=value_error, input_value=Args]",
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    ]
    assert cause_of(lines) == "Sleep mode is not supported on current platform."


def test_the_first_error_is_the_cause_and_not_the_last():
    lines = [
        WORKER + "    raise ValueError(",
        WORKER + "ValueError: Available memory on node 0 (21.34/23.21 GiB) is less than requested (400.0 GiB).",
        ENGINE + "RuntimeError: cancelled",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    ]
    assert cause_of(lines) == "Available memory on node 0 (21.34/23.21 GiB) is less than requested (400.0 GiB)."


def test_gpu_out_of_memory():
    line = ENGINE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert cause_of([line]) == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_what_a_healthy_start_says_of_free_gpu_memory_is_no_cause_of_a_later_end():
    told = "Free memory on device (124.05/139.8 GiB) on startup. Desired GPU memory utilization is (0.4, 55.92 GiB)."
    assert cause_of([ENGINE_INFO + f"[gpu_worker.py:857] {told}", WORKER + "RuntimeError: Xid 79"]) == "Xid 79"
    short = (
        "Free memory on device cuda:0 (70.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.9)."
    )
    assert cause_of([ENGINE + short, ENGINE + "RuntimeError: cancelled"]) == short


def test_an_engine_that_was_killed_is_told_in_plain_words():
    lines = [
        "(APIServer pid=739) WARNING 11-30 21:54:57 [core_client.py:702] [shutdown] MPClient: engine core exited "
        "unexpectedly; starting cleanup",
        "(APIServer pid=739) ERROR 11-30 21:54:57 [async_llm.py:704] Traceback (most recent call last):",
        "(APIServer pid=739) ERROR 11-30 21:54:57 [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: "
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "INFO:     Application shutdown complete.",
    ]
    assert cause_of(lines) == "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
    own = ENGINE + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert cause_of([own, *lines]).startswith("AcceleratorError: CUDA error: an illegal memory access")


def test_a_missing_model_is_named():
    line = "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/nonexistent/model'."
    assert cause_of([line]).startswith("HFValidationError: Repo id must be in the form")


def test_without_any_error_the_last_line_stands():
    assert cause_of(["one", "two", ""]) == "two"
    assert cause_of([]) == ""


def test_a_vague_error_is_better_than_the_last_line():
    lines = ["RuntimeError: Engine core initialization failed. See root cause above.", "  warnings.warn('leaked')"]
    assert cause_of(lines).startswith("RuntimeError: Engine core initialization failed")


def test_colours_and_length_do_not_reach_the_status_page():
    assert cause_of(["\x1b[31mValueError: " + "x" * 5000 + "\x1b[0m"]) == "x" * MAX_CAUSE


def test_ordinary_lines_name_no_cause():
    for line in (
        "INFO:     Application startup complete.",
        "(APIServer pid=1) WARNING 11-30 20:22:27 [a.py:1] Error rate: 0",
    ):
        assert not names_a_cause(line)
    assert names_a_cause(ENGINE + "ValueError: No available memory for the cache blocks.")
