// A tokenizer on the command line, for the comparison with other libraries (tokenizers_test.py, test_finetuning.py):
//   tokenizer_program encode FOLDER      each line of standard input, JSON: a text, a pair of texts or ids to decode;
//                                        answers with a line of JSON each
//   tokenizer_program score -            each line: a prediction and a reference; answers with exact match and F1
//   tokenizer_program speed FOLDER FILE  encodes the lines of a file; prints bytes and seconds of CPU time
//   tokenizer_program samples FOLDER FILE TASK SEQUENCE  the held-out samples of a file, a line of JSON each
#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/data/examples.h"
#include "apps/data/metrics.h"
#include "apps/data/tokenizers/tokenizer.h"

namespace {

using Json = nlohmann::json;

Json to_json(const data::Encoding& encoding) {
  Json offsets = Json::array();
  for (const auto& range : encoding.offsets) offsets.push_back({range.begin, range.end});
  return {{"ids", encoding.ids}, {"offsets", offsets}, {"types", encoding.types}};
}

Json answer(const data::Tokenizer& tokenizer, const Json& asked) {
  if (asked.is_string()) {
    const auto& text = asked.get_ref<const std::string&>();
    auto result = to_json(tokenizer.encode_with_offsets(text));
    if (tokenizer.encode(text) != result["ids"].get<std::vector<std::int32_t>>()) result["ids"] = "two answers";
    result["plain"] = tokenizer.encode(text, false);
    return result;
  }
  if (asked.is_array()) return to_json(tokenizer.encode_pair(asked[0].get<std::string>(), asked[1].get<std::string>()));
  return tokenizer.decode(asked.at("ids").get<std::vector<std::int32_t>>(), asked.at("skip").get<bool>());
}

void print_samples(const std::shared_ptr<const data::Tokenizer>& tokenizer, const std::string& file, const char* task,
                   const char* sequence) {
  data::ExampleOptions options;
  options.task = data::task_of(task);
  options.files = options.heldout_files = {file};
  options.sequence = std::stoll(sequence);
  const data::Examples examples(options, tokenizer);
  for (std::int64_t i = 0; i < examples.heldout_samples(); ++i) {
    const auto sample = examples.heldout(i);
    std::cout << Json{{"ids", sample.ids}, {"labels", sample.labels}}.dump() << '\n';
  }
}

double seconds_to_encode(const data::Tokenizer& tokenizer, const std::vector<std::string>& lines) {
  const auto begin = std::clock();
  for (const auto& line : lines) (void)tokenizer.encode(line);
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 3) return 2;
    if (std::string(argv[1]) == "score") {
      for (std::string line; std::getline(std::cin, line);) {
        const auto pair = Json::parse(line).get<std::vector<std::string>>();
        std::cout << Json{data::exact_match(pair[0], {pair[1]}), data::answer_f1(pair[0], {pair[1]})} << '\n';
      }
      return 0;
    }
    const std::shared_ptr<const data::Tokenizer> tokenizer = data::load_tokenizer(argv[2]);
    if (std::string(argv[1]) == "samples" && argc == 6) {
      print_samples(tokenizer, argv[3], argv[4], argv[5]);
    } else if (std::string(argv[1]) == "encode") {
      for (std::string line; std::getline(std::cin, line);)
        std::cout << answer(*tokenizer, Json::parse(line)).dump() << '\n';
    } else {
      std::vector<std::string> lines;
      std::size_t bytes = 0;
      std::ifstream in(argv[3]);
      for (std::string line; std::getline(in, line); lines.push_back(line)) bytes += line.size();
      std::cout << Json{{"bytes", bytes}, {"seconds", seconds_to_encode(*tokenizer, lines)}} << '\n';
    }
  } catch (const std::exception& e) {
    std::cerr << e.what() << '\n';
    return 1;
  }
  return 0;
}
