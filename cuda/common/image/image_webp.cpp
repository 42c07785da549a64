// WebP files through libwebp: lossy, lossless, with alpha, and the first frame of an animation.
#include <webp/decode.h>
#include <webp/demux.h>

#include <cstring>

#include "image_file.h"

namespace mimo {
namespace {

class WebpFile final : public ImageFile {
 public:
  explicit WebpFile(Bytes bytes) : ImageFile(ImageFormat::webp, PixelMode::rgb), bytes_(bytes) {
    WebPBitstreamFeatures features;
    refuse_unless_ok(WebPGetFeatures(bytes.data(), bytes.size(), &features));
    if (features.has_alpha) header_.mode = PixelMode::rgba;
    header_.channels = bytes_of(header_.mode);
    animated_ = features.has_animation;
    set_size(features.width, features.height);
  }

  /// Lossless pictures are decoded to four bytes a pixel, alpha to one; an animation has two canvases.
  int64_t working_bytes() const override { return header_.area() * (animated_ ? 12 : 5); }

  void read(uint8_t* pixels) override { animated_ ? read_first_frame(pixels) : read_still(pixels); }

 private:
  static void refuse_unless_ok(VP8StatusCode status) {
    switch (status) {
      case VP8_STATUS_OK: return;
      case VP8_STATUS_OUT_OF_MEMORY: throw std::bad_alloc();
      case VP8_STATUS_NOT_ENOUGH_DATA: refuse_cut_off();
      default: refuse_damaged("it is no WebP that can be decoded");
    }
  }

  void read_still(uint8_t* pixels) const {
    WebPDecoderConfig config;
    if (!WebPInitDecoderConfig(&config)) throw Error(MIMO_ERROR_INTERNAL, "libwebp is of another version.");
    config.output.colorspace = header_.mode == PixelMode::rgba ? MODE_RGBA : MODE_RGB;
    config.output.is_external_memory = 1;
    config.output.u.RGBA.rgba = pixels;
    config.output.u.RGBA.stride = header_.width * bytes_of(header_.mode);
    config.output.u.RGBA.size = static_cast<size_t>(header_.bytes());
    refuse_unless_ok(WebPDecode(bytes_.data(), bytes_.size(), &config));
  }

  /// The canvas outside the first frame is transparent black.
  void read_first_frame(uint8_t* pixels) const {
    const WebPData data{bytes_.data(), bytes_.size()};
    struct Free {
      void operator()(WebPAnimDecoder* decoder) const { WebPAnimDecoderDelete(decoder); }
    };
    const std::unique_ptr<WebPAnimDecoder, Free> decoder(WebPAnimDecoderNew(&data, nullptr));
    uint8_t* canvas = nullptr;
    int end = 0;
    if (!decoder || !WebPAnimDecoderGetNext(decoder.get(), &canvas, &end)) refuse_damaged("its first frame cannot be read");
    if (header_.mode == PixelMode::rgba) {
      std::memcpy(pixels, canvas, static_cast<size_t>(header_.bytes()));
      return;
    }
    for (int64_t i = 0; i < header_.area(); ++i) std::memcpy(pixels + 3 * i, canvas + 4 * i, 3);
  }

  Bytes bytes_;
  bool animated_ = false;
};

}  // namespace

std::unique_ptr<ImageFile> open_webp(Bytes bytes) { return std::make_unique<WebpFile>(bytes); }

}  // namespace mimo
