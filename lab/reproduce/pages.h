// Records of `zero reproduce` as text for a terminal, as one HTML file, and as a page of docs/ with pictures. A
// function of the records alone: the same records give the same bytes.
#pragma once
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "lab/reproduce/record.h"

namespace zero::cli {

std::string text_of(const Record& record, std::size_t columns);
std::string html_of(const std::vector<Record>& records);

struct DocsPage {
  std::string markdown;
  std::vector<std::pair<std::string, std::string>> pictures;  // file name, SVG
};
// stem: of the page's file, with which the names of pictures begin.
DocsPage docs_of(const std::vector<Record>& records, const std::string& stem);

}  // namespace zero::cli
