"""An inference engine with tensor parallelism over two workers, by vLLM: ``vllm_engine.py FOLDER``.

The model has two layers and weights at random. Between two batches each worker runs a function of ours.
"""

import json
import os
import sys
import time
from pathlib import Path

from common import STEP_S, count_when_asked, download_shard

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
# Workers spin while they wait: both on one CPU, so that others can run beside them.
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


class Extension:
    """Methods that vLLM adds to its workers."""

    rank: int

    def count_when_asked(self, folder: str) -> None:
        count_when_asked(Path(folder), self.rank)

    def reload(self, folder: str) -> None:
        download_shard(Path(folder), self.rank)


def serve(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    engine = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=5,
        worker_extension_cls="vllm_engine.Extension",
    )
    tokens = SamplingParams(max_tokens=7, ignore_eos=True, detokenize=False)
    engine.collective_rpc("count_when_asked", args=(str(folder),))
    while True:
        engine.generate([{"prompt_token_ids": [5, 7, 23]}], tokens, use_tqdm=False)
        time.sleep(STEP_S)
        engine.collective_rpc("reload", args=(str(folder),))


if __name__ == "__main__":
    os.environ |= {**SETTINGS, "PYTHONPATH": str(Path(__file__).parent)}
    serve(Path(sys.argv[1]))
