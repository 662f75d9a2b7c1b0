// The built-in name maps. "Theirs" are the names that transformers 5 writes, and PEFT for low-rank adapters
// (models/lora.h), whose factors are nn.Linear also for a Conv1D.
#include <iterator>
#include <utility>

#include "interchange/names.h"

namespace zero::interchange {
namespace {

// Conv1D stores [in, out]; nn::Linear stores [out, in].
constexpr const char* kGpt2 = R"({
  "format": "zero.names/1",
  "prefix": "transformer.",
  "rules": [
    {"ours": "token.weight", "theirs": "transformer.wte.weight"},
    {"ours": "position.weight", "theirs": "transformer.wpe.weight"},
    {"ours": "blocks.{i}.norm1.weight", "theirs": "transformer.h.{i}.ln_1.weight"},
    {"ours": "blocks.{i}.norm1.bias", "theirs": "transformer.h.{i}.ln_1.bias"},
    {"ours": "blocks.{i}.norm2.weight", "theirs": "transformer.h.{i}.ln_2.weight"},
    {"ours": "blocks.{i}.norm2.bias", "theirs": "transformer.h.{i}.ln_2.bias"},
    {"ours": "blocks.{i}.qkv.weight", "theirs": "transformer.h.{i}.attn.c_attn.weight", "op": "transpose"},
    {"ours": "blocks.{i}.qkv.bias", "theirs": "transformer.h.{i}.attn.c_attn.bias"},
    {"ours": "blocks.{i}.projection.weight", "theirs": "transformer.h.{i}.attn.c_proj.weight", "op": "transpose"},
    {"ours": "blocks.{i}.projection.bias", "theirs": "transformer.h.{i}.attn.c_proj.bias"},
    {"ours": "blocks.{i}.up.weight", "theirs": "transformer.h.{i}.mlp.c_fc.weight", "op": "transpose"},
    {"ours": "blocks.{i}.up.bias", "theirs": "transformer.h.{i}.mlp.c_fc.bias"},
    {"ours": "blocks.{i}.down.weight", "theirs": "transformer.h.{i}.mlp.c_proj.weight", "op": "transpose"},
    {"ours": "blocks.{i}.down.bias", "theirs": "transformer.h.{i}.mlp.c_proj.bias"},
    {"ours": "blocks.{i}.qkv.lora_A.weight", "theirs": "transformer.h.{i}.attn.c_attn.lora_A.weight"},
    {"ours": "blocks.{i}.qkv.lora_B.weight", "theirs": "transformer.h.{i}.attn.c_attn.lora_B.weight"},
    {"ours": "blocks.{i}.projection.lora_A.weight", "theirs": "transformer.h.{i}.attn.c_proj.lora_A.weight"},
    {"ours": "blocks.{i}.projection.lora_B.weight", "theirs": "transformer.h.{i}.attn.c_proj.lora_B.weight"},
    {"ours": "blocks.{i}.up.lora_A.weight", "theirs": "transformer.h.{i}.mlp.c_fc.lora_A.weight"},
    {"ours": "blocks.{i}.up.lora_B.weight", "theirs": "transformer.h.{i}.mlp.c_fc.lora_B.weight"},
    {"ours": "blocks.{i}.down.lora_A.weight", "theirs": "transformer.h.{i}.mlp.c_proj.lora_A.weight"},
    {"ours": "blocks.{i}.down.lora_B.weight", "theirs": "transformer.h.{i}.mlp.c_proj.lora_B.weight"},
    {"ours": "norm.weight", "theirs": "transformer.ln_f.weight"},
    {"ours": "norm.bias", "theirs": "transformer.ln_f.bias"},
    {"ours": "output.weight", "theirs": "lm_head.weight"}
  ],
  "ties": [{"alias": "lm_head.weight", "stored": "transformer.wte.weight"}],
  "ignore": ["*.attn.bias", "*.attn.masked_bias"]
})";

constexpr const char* kLlama = R"({
  "format": "zero.names/1",
  "rules": [{"ours": "*", "theirs": "*"}],
  "ties": [{"alias": "lm_head.weight", "stored": "model.embed_tokens.weight"}],
  "ignore": ["*.rotary_emb.inv_freq"]
})";

constexpr const char* kBert = R"({
  "format": "zero.names/1",
  "rules": [
    {"ours": "*.LayerNorm.weight", "theirs": "*.LayerNorm.weight", "also": ["*.LayerNorm.gamma"]},
    {"ours": "*.LayerNorm.bias", "theirs": "*.LayerNorm.bias", "also": ["*.LayerNorm.beta"]},
    {"ours": "*", "theirs": "*"}
  ],
  "ties": [
    {"alias": "cls.predictions.decoder.weight", "stored": "bert.embeddings.word_embeddings.weight",
     "if": "cls.predictions.*"},
    {"alias": "cls.predictions.decoder.bias", "stored": "cls.predictions.bias"}
  ],
  "ignore": ["*.position_ids"]
})";

constexpr const char* kT5 = R"({
  "format": "zero.names/1",
  "rules": [{"ours": "*", "theirs": "*"}],
  "ties": [
    {"alias": "encoder.embed_tokens.weight", "stored": "shared.weight"},
    {"alias": "decoder.embed_tokens.weight", "stored": "shared.weight", "if": "decoder.*"},
    {"alias": "lm_head.weight", "stored": "shared.weight", "if": "decoder.*"}
  ]
})";

// transformers 5 has newer names in memory than in its files.
constexpr const char* kVit = R"({
  "format": "zero.names/1",
  "rules": [
    {"ours": "vit.layers.{i}.attention.q_proj.*", "theirs": "vit.encoder.layer.{i}.attention.attention.query.*",
     "also": ["vit.layers.{i}.attention.q_proj.*"]},
    {"ours": "vit.layers.{i}.attention.k_proj.*", "theirs": "vit.encoder.layer.{i}.attention.attention.key.*",
     "also": ["vit.layers.{i}.attention.k_proj.*"]},
    {"ours": "vit.layers.{i}.attention.v_proj.*", "theirs": "vit.encoder.layer.{i}.attention.attention.value.*",
     "also": ["vit.layers.{i}.attention.v_proj.*"]},
    {"ours": "vit.layers.{i}.attention.o_proj.*", "theirs": "vit.encoder.layer.{i}.attention.output.dense.*",
     "also": ["vit.layers.{i}.attention.o_proj.*"]},
    {"ours": "vit.layers.{i}.layernorm_before.*", "theirs": "vit.encoder.layer.{i}.layernorm_before.*",
     "also": ["vit.layers.{i}.layernorm_before.*"]},
    {"ours": "vit.layers.{i}.layernorm_after.*", "theirs": "vit.encoder.layer.{i}.layernorm_after.*",
     "also": ["vit.layers.{i}.layernorm_after.*"]},
    {"ours": "vit.layers.{i}.mlp.fc1.*", "theirs": "vit.encoder.layer.{i}.intermediate.dense.*",
     "also": ["vit.layers.{i}.mlp.fc1.*"]},
    {"ours": "vit.layers.{i}.mlp.fc2.*", "theirs": "vit.encoder.layer.{i}.output.dense.*",
     "also": ["vit.layers.{i}.mlp.fc2.*"]},
    {"ours": "*", "theirs": "*"}
  ]
})";

constexpr std::pair<const char*, const char*> kMaps[] = {
    {"gpt2", kGpt2}, {"llama", kLlama}, {"bert", kBert}, {"t5", kT5}, {"vit", kVit}};

}  // namespace

std::vector<std::string> NameMap::builtin_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : kMaps) names.emplace_back(name);
  return names;
}

const char* NameMap::builtin_text(const std::string& name) {
  for (const auto& [known, text] : kMaps)
    if (name == known) return text;
  return nullptr;
}

}  // namespace zero::interchange
