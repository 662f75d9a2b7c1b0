#include "checkpoint/agreement.h"

#include <zero/errors.h>

#include <algorithm>

#include "base/check.h"

namespace zero::checkpoint {
namespace {

enum class Kind : char { Good = '0', Config = '1', Io = '2', Internal = '3' };

std::string message(Kind kind, ExitCode code, const std::string& text) {
  return std::string{static_cast<char>(kind), static_cast<char>(code)} + text;
}

std::string outcome_of(const std::function<std::string()>& part) {
  try {
    return message(Kind::Good, ExitCode::kOk, part());
  } catch (const CommError&) {
    throw;
  } catch (const ConfigError& e) {
    return message(Kind::Config, e.code(), e.what());
  } catch (const IoError& e) {
    return message(Kind::Io, e.code(), e.what());
  } catch (const Error& e) {
    return message(Kind::Internal, e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return message(Kind::Internal, ExitCode::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    return message(Kind::Internal, ExitCode::kFailed, e.what());
  }
}

}  // namespace

std::vector<std::string> agree(Communicator& comm, const char* where, const std::function<std::string()>& part) {
  auto outcomes = comm.exchange(outcome_of(part));
  const auto good = [](const std::string& text) {
    return text.size() >= 2 && text[0] == static_cast<char>(Kind::Good);
  };
  const auto first = std::find_if_not(outcomes.begin(), outcomes.end(), good);
  if (first == outcomes.end()) {
    for (auto& text : outcomes) text.erase(0, 2);
    return outcomes;
  }
  ZERO_CHECK(first->size() >= 2, "an outcome of ", first->size(), " bytes");
  std::string text;
  if (std::all_of(outcomes.begin(), outcomes.end(), [&](const std::string& other) { return other == *first; })) {
    text = first->substr(2);  // a mistake that all made is one mistake
  } else {
    text = base::join("[", where, "]");
    for (std::size_t r = 0; r < outcomes.size(); ++r)
      if (!good(outcomes[r]))
        text +=
            base::join(text.back() == ']' ? " " : "; ", "rank ", r, "/", outcomes.size(), ": ", outcomes[r].substr(2));
  }
  const auto code = static_cast<ExitCode>((*first)[1]);
  switch (static_cast<Kind>((*first)[0])) {
    case Kind::Config:
      throw ConfigError(text, code);
    case Kind::Io:
      throw IoError(text, code);
    default:
      throw InternalError(text, code);
  }
}

}  // namespace zero::checkpoint
