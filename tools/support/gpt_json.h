// The shape of a GPT in the JSON of a rank's task (rank_processes.h).
#pragma once
#include "models/gpt_config.h"

namespace models {

template <class Json>
void to_json(Json& json, const GptConfig& gpt) {
  json = Json::array({gpt.layers, gpt.hidden, gpt.heads, gpt.sequence, gpt.vocabulary, gpt.tied_output});
}

template <class Json>
void from_json(const Json& json, GptConfig& gpt) {
  json.at(0).get_to(gpt.layers);
  json.at(1).get_to(gpt.hidden);
  json.at(2).get_to(gpt.heads);
  json.at(3).get_to(gpt.sequence);
  json.at(4).get_to(gpt.vocabulary);
  json.at(5).get_to(gpt.tied_output);
}

}  // namespace models
