#pragma once
#include <string>

namespace mimo {

/// "libjpeg-turbo 2.1.5, libwebp 1.2.4, giflib 5.2.1, libdeflate 1.14".
std::string image_versions();

}  // namespace mimo
