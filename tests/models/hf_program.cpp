// Runs the models of models/ on files of transformers, for python/tests/test_hf_models.py. Each job of JOBS.json builds
// a model from a folder's config.json, loads its weights through an Engine, computes, and may write the weights again,
// or the gradients of the loss in their place.
//
//   hf_models_program JOBS.json
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <zero/library.h>

#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "models/bert.h"
#include "models/gpt.h"
#include "models/hf_config.h"
#include "models/llama.h"
#include "models/t5.h"
#include "models/vit.h"

namespace {

using Json = nlohmann::json;
using Tensors = std::map<std::string, at::Tensor>;

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  if (!in) throw std::runtime_error("cannot read " + path);
  return text.str();
}

Tensors load(const std::string& path) {
  const auto text = read(path);
  Tensors tensors;
  const auto value = torch::pickle_load({text.begin(), text.end()});
  for (const auto& item : value.toGenericDict()) tensors[item.key().toStringRef()] = item.value().toTensor();
  return tensors;
}

void save(const std::string& path, const Tensors& tensors) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor.contiguous());
  const auto bytes = torch::pickle_save(dict);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

using Generate = std::function<at::Tensor(const at::Tensor& tokens, const at::Tensor& mask, std::int64_t count,
                                          const models::Sampling& sampling)>;

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensors(const Tensors& inputs)> run;
  Generate generate = nullptr;  // null: not a decoder
};

template <class Holder>
Model bert(const models::BertConfig& config) {
  Holder model(config);
  return {model.ptr(), [model](const Tensors& in) mutable -> Tensors {
            const auto find = [&](const char* name) { return in.contains(name) ? in.at(name) : at::Tensor(); };
            const models::BertInput input{in.at("input_ids"), find("attention_mask"), find("token_type_ids")};
            if constexpr (std::is_same_v<Holder, models::BertForQuestionAnswering>) {
              const auto [first, last] = model->forward(input);
              Tensors out{{"start_logits", first}, {"end_logits", last}};
              if (in.contains("start_positions"))
                out["loss"] = model->loss(input, in.at("start_positions"), in.at("end_positions"));
              return out;
            } else {
              Tensors out{{"logits", model->forward(input)}};
              if (in.contains("labels")) out["loss"] = model->loss(input, in.at("labels"));
              return out;
            }
          }};
}

template <class Holder>
Generate generates(Holder model) {
  return [model](const at::Tensor& tokens, const at::Tensor& mask, std::int64_t count,
                 const models::Sampling& sampling) mutable { return model->generate(tokens, count, sampling, mask); };
}

Model make(const models::HfConfig& described) {
  const auto& as = described.architecture;
  if (const auto* c = std::get_if<models::GptConfig>(&described.config)) {
    models::Gpt model(*c);
    return {model.ptr(),
            [model](const Tensors& in) mutable -> Tensors {
              Tensors out{{"logits", model->forward(in.at("input_ids"))}};
              if (in.contains("targets")) out["loss"] = model->forward(in.at("input_ids"), in.at("targets"));
              return out;
            },
            generates(model)};
  }
  if (const auto* c = std::get_if<models::LlamaConfig>(&described.config)) {
    models::Llama model(*c);
    return {model.ptr(),
            [model](const Tensors& in) mutable -> Tensors {
              const at::Tensor mask = in.contains("attention_mask") ? in.at("attention_mask") : at::Tensor();
              Tensors out{{"logits", model->forward(in.at("input_ids"), mask)}};
              if (in.contains("targets")) out["loss"] = model->loss(in.at("input_ids"), in.at("targets"), mask);
              return out;
            },
            generates(model)};
  }
  if (const auto* c = std::get_if<models::BertConfig>(&described.config)) {
    if (as == "BertForMaskedLM") return bert<models::BertForMaskedLM>(*c);
    if (as == "BertForSequenceClassification") return bert<models::BertForSequenceClassification>(*c);
    if (as == "BertForQuestionAnswering") return bert<models::BertForQuestionAnswering>(*c);
  }
  if (const auto* c = std::get_if<models::T5Config>(&described.config)) {
    models::T5ForConditionalGeneration model(*c);
    return {model.ptr(),
            [model](const Tensors& in) mutable -> Tensors {
              const auto find = [&](const char* name) { return in.contains(name) ? in.at(name) : at::Tensor(); };
              const at::Tensor tokens = in.at("input_ids"), mask = find("attention_mask"), labels = find("labels");
              if (!labels.defined())
                return {{"logits",
                         model->forward(tokens, in.at("decoder_input_ids"), mask, find("decoder_attention_mask"))}};
              return {{"logits", model->forward(tokens, model->shift_right(labels), mask)},
                      {"loss", model->loss(tokens, labels, mask)}};
            },
            generates(model)};
  }
  if (const auto* c = std::get_if<models::VitConfig>(&described.config)) {
    models::VitForImageClassification model(*c);
    return {model.ptr(), [model](const Tensors& in) mutable -> Tensors {
              return {{"logits", model->forward(in.at("pixel_values"))},
                      {"loss", model->loss(in.at("pixel_values"), in.at("labels"))}};
            }};
  }
  throw std::runtime_error("no model for " + as);
}

// Puts the gradients of the loss where the weights are, so that an export has them as transformers has its own.
void replace_weights_by_gradients(zero::Engine& engine, const Model& model, const Tensors& inputs) {
  engine.backward(model.run(inputs).at("loss"));
  Tensors gradients;
  for (const auto& item : model.module->named_parameters()) gradients[item.key()] = engine.gradient(item.key());
  engine.step();
  auto whole = engine.gathered_parameters(/*modify=*/true);
  const torch::NoGradGuard no_grad;
  for (const auto& item : model.module->named_parameters()) item.value().copy_(gradients.at(item.key()));
  whole.close();
}

void run(const Json& job, const std::shared_ptr<zero::Communicator>& comm) {
  const std::string folder = job.at("folder"), dtype = job.value("dtype", "fp32");
  const auto described = models::read_hf_config(folder);
  const auto model = make(described);
  Json options = {{"train_micro_batch_size_per_gpu", 1},
                  {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}}}}},
                  {"zero_optimization", {{"stage", job.value("stage", 0)}}}};
  if (dtype != "fp32") options[dtype] = {{"enabled", true}};
  zero::Engine engine(model.module, zero::Options::from_json(options.dump()), comm);
  zero::ImportOptions import;
  import.names = models::model_type(described.config);
  engine.load_weights(folder, import);
  model.module->eval();
  Tensors inputs = load(job.at("inputs")), outputs;
  {
    const torch::NoGradGuard no_grad;
    outputs = model.run(inputs);
  }
  if (job.contains("generate")) {
    const Json& wanted = job.at("generate");
    models::Sampling sampling{.temperature = wanted.value("temperature", 0.0),
                              .top_k = wanted.value("top_k", 0),
                              .top_p = wanted.value("top_p", 1.0),
                              .eos_tokens = wanted.value("eos", std::vector<std::int64_t>()),
                              .pad_token = wanted.value("pad", 0)};
    // Ranks have the same rows, and agree at every token as if they had not.
    if (comm->size() > 1)
      sampling.stop = [&](bool ended) {
        bool all = true;
        for (const auto& text : comm->all_gather_bytes(ended ? "1" : "0")) all = all && text == "1";
        return all;
      };
    const at::Tensor mask = inputs.contains("attention_mask") ? inputs.at("attention_mask") : at::Tensor();
    outputs["generated"] = model.generate(inputs.at("input_ids"), mask, wanted.at("count"), sampling);
    if (sampling.temperature > 0)
      outputs["filtered"] = models::filtered_logits(outputs.at("logits").select(1, -1).to(torch::kFloat32), sampling);
  }
  for (auto& [name, tensor] : outputs) tensor = tensor.to(torch::kFloat32);
  if (comm->rank() == 0) {
    std::string names;
    for (const auto& item : model.module->named_parameters()) names += item.key() + "\n";
    std::ofstream(job.at("outputs").get<std::string>() + ".names") << names;
    save(job.at("outputs"), outputs);
  }
  if (job.value("gradients", false)) replace_weights_by_gradients(engine, model, inputs);
  if (!job.contains("export")) return;
  zero::ExportOptions out;
  out.names = import.names;
  out.dtype = "";
  engine.export_weights(job.at("export").get<std::string>(), out);
  comm->barrier();
  if (comm->rank() == 0)
    std::ofstream(job.at("export").get<std::string>() + "/config.json") << models::hf_config_text(described);
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count != 2) throw std::runtime_error("usage: hf_models_program JOBS.json");
    torch::set_num_threads(1);
    for (const Json& job : Json::parse(read(words[1])))
      zero::run_ranks(job.value("ranks", 1), [&](const auto& comm) { run(job, comm); });
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
