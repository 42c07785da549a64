// JPEG files through libjpeg-turbo with Pillow's settings: exact integer DCT, smooth upsampling, warnings ignored.
#include <csetjmp>
#include <cstdio>
#include <cstring>

#include "image_file.h"
// Must follow <cstdio>.
#include <jpeglib.h>
#include <jerror.h>

namespace mimo {
namespace {

/// Limit of the scans of a progressive image; encoders write about ten.
constexpr int most_scans = 250;
/// Limit of the samples in all scans of an image. Each scan costs time for every sample of its components, whatever the file's
/// size: the ten scans that encoders write for the largest image with full colour have 2.5 thousand million.
constexpr int64_t most_work = int64_t{1} << 32;

/// libjpeg's messages. Its own table comes with its printing code, which cannot be linked into a shared library.
constexpr const char* messages[] = {
#define JVERSION ""
#define JCOPYRIGHT_SHORT ""
#define JMESSAGE(code, text) text,
#include <jerror.h>
    nullptr};

struct ErrorManager {
  jpeg_error_mgr base;
  std::jmp_buf failed;
  bool raised;
};

void raise(j_common_ptr image) {
  auto& errors = *reinterpret_cast<ErrorManager*>(image->err);
  errors.raised = true;
  std::longjmp(errors.failed, 1);
}

/// Pillow ignores warnings.
void count_warning(j_common_ptr image, int level) {
  if (level < 0) ++image->err->num_warnings;
}

void ignore_message(j_common_ptr) {}

void format_message(j_common_ptr image, char* text) {
  const jpeg_error_mgr& error = *image->err;
  const bool known = error.msg_code > 0 && error.msg_code < JMSG_LASTMSGCODE;
  const char* message = messages[known ? error.msg_code : 0];
  const char* placeholder = std::strchr(message, '%');
  if (placeholder != nullptr && placeholder[1] == 's') {
    std::snprintf(text, JMSG_LENGTH_MAX, message, error.msg_parm.s);
    return;
  }
  const auto& numbers = error.msg_parm.i;
  std::snprintf(text, JMSG_LENGTH_MAX, message, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5],
                numbers[6], numbers[7]);
}

void reset_errors(j_common_ptr image) {
  image->err->num_warnings = 0;
  image->err->msg_code = 0;
}

void ignore_source(j_decompress_ptr) {}

/// No more input: functions that need some return as suspended.
boolean no_more_input(j_decompress_ptr) { return FALSE; }

void skip_input(j_decompress_ptr image, long count) {
  jpeg_source_mgr& source = *image->src;
  const size_t skipped = count < 0 ? 0 : static_cast<size_t>(count);
  const size_t taken = skipped < source.bytes_in_buffer ? skipped : source.bytes_in_buffer;
  source.next_input_byte += taken;
  source.bytes_in_buffer -= taken;
}

struct Progress {
  jpeg_progress_mgr base;
  int scan;
  int64_t work;
};

/// Bytes of the coefficients, and number of samples, of a block.
constexpr int64_t block_samples = 64, block_bytes = 128;

int64_t blocks_of(const jpeg_component_info& component) {
  return int64_t{component.width_in_blocks} * component.height_in_blocks;
}

/// libjpeg calls this within every scan.
void bound_work(j_common_ptr common) {
  auto* image = reinterpret_cast<j_decompress_ptr>(common);
  auto& progress = *reinterpret_cast<Progress*>(image->progress);
  if (image->input_scan_number == progress.scan) return;
  progress.scan = image->input_scan_number;
  for (int i = 0; i < image->comps_in_scan; ++i) progress.work += block_samples * blocks_of(*image->cur_comp_info[i]);
  if (progress.scan > most_scans || progress.work > most_work) ERREXIT(common, JERR_BAD_PROGRESSION);
}

/// libjpeg reports errors by longjmp: functions that arm it hold nothing with a destructor.
class JpegFile final : public ImageFile {
 public:
  explicit JpegFile(Bytes bytes) : ImageFile(ImageFormat::jpeg, PixelMode::rgb) {
    image_.err = &errors_.base;
    errors_.base = {};
    errors_.base.error_exit = raise;
    errors_.base.emit_message = count_warning;
    errors_.base.output_message = ignore_message;
    errors_.base.format_message = format_message;
    errors_.base.reset_error_mgr = reset_errors;
    if (!start(bytes)) {
      // A constructor that throws runs no destructor.
      const Failure failure = last_failure();
      jpeg_destroy_decompress(&image_);
      refuse(failure);
    }
    try {
      set_size(image_.image_width, image_.image_height);
    } catch (...) {
      jpeg_destroy_decompress(&image_);
      throw;
    }
  }
  ~JpegFile() override { jpeg_destroy_decompress(&image_); }
  JpegFile(const JpegFile&) = delete;
  JpegFile& operator=(const JpegFile&) = delete;

  /// The coefficients of an image in several scans; rows of the others.
  int64_t working_bytes() const override {
    int64_t blocks = 0;
    for (int i = 0; i < image_.num_components; ++i) {
      const jpeg_component_info& component = image_.comp_info[i];
      blocks += several_scans_ ? blocks_of(component) : int64_t{component.width_in_blocks} * 2 * component.v_samp_factor;
    }
    return blocks * block_bytes;
  }

  void read(uint8_t* pixels) override {
    if (!decode(pixels)) {
      if (takes_too_long()) {
        refuse_image("takes too long to decode: " + std::to_string(header_.width) + " x " + std::to_string(header_.height) +
                     " pixels in " + std::to_string(progress_.scan) + " scans and more");
      }
      refuse(last_failure());
    }
    if (header_.mode != PixelMode::cmyk) return;
    // Pillow treats all CMYK files as Adobe's, whose values are inverted.
    for (int64_t i = 0; i < header_.bytes(); ++i) pixels[i] = static_cast<uint8_t>(255 - pixels[i]);
  }

 private:
  struct Failure {
    bool cut_off;
    bool other_coding;
    std::string reason;
  };

  bool start(Bytes bytes) {
    if (setjmp(errors_.failed)) return false;
    jpeg_create_decompress(&image_);
    source_.init_source = ignore_source;
    source_.fill_input_buffer = no_more_input;
    source_.skip_input_data = skip_input;
    source_.resync_to_restart = jpeg_resync_to_restart;
    source_.term_source = ignore_source;
    source_.next_input_byte = bytes.data();
    source_.bytes_in_buffer = bytes.size();
    image_.src = &source_;
    progress_.base.progress_monitor = bound_work;
    image_.progress = &progress_.base;
    int found;
    do {
      found = jpeg_read_header(&image_, FALSE);
    } while (found == JPEG_HEADER_TABLES_ONLY);
    if (found != JPEG_HEADER_OK) return false;
    header_.channels = image_.num_components;
    several_scans_ = jpeg_has_multiple_scans(&image_) != FALSE;
    switch (image_.num_components) {
      case 1:
        header_.mode = PixelMode::grey;
        image_.out_color_space = JCS_GRAYSCALE;
        return true;
      case 3:
        header_.mode = PixelMode::rgb;
        image_.out_color_space = JCS_RGB;
        return true;
      case 4:
        header_.mode = PixelMode::cmyk;
        image_.out_color_space = JCS_CMYK;
        return true;
      default: ERREXIT2(&image_, JERR_COMPONENT_COUNT, image_.num_components, 4);
    }
    return false;
  }

  bool decode(uint8_t* pixels) {
    if (setjmp(errors_.failed)) return false;
    if (!jpeg_start_decompress(&image_)) return false;
    const size_t stride = static_cast<size_t>(header_.width) * static_cast<size_t>(bytes_of(header_.mode));
    constexpr JDIMENSION rows_at_once = 16;
    JSAMPROW rows[rows_at_once];
    while (image_.output_scanline < image_.output_height) {
      JDIMENSION count = image_.output_height - image_.output_scanline;
      if (count > rows_at_once) count = rows_at_once;
      for (JDIMENSION i = 0; i < count; ++i) rows[i] = pixels + (image_.output_scanline + i) * stride;
      if (jpeg_read_scanlines(&image_, rows, count) == 0) return false;
    }
    // Pillow accepts a missing end marker, but no other damage after the last row.
    jpeg_finish_decompress(&image_);
    return true;
  }

  Failure last_failure() {
    // libjpeg does not report the end of input as an error.
    if (!errors_.raised) return {true, false, ""};
    char reason[JMSG_LENGTH_MAX];
    format_message(reinterpret_cast<j_common_ptr>(&image_), reason);
    return {false, image_.err->msg_code == JERR_SOF_UNSUPPORTED, reason};
  }

  bool takes_too_long() const { return progress_.scan > most_scans || progress_.work > most_work; }

  [[noreturn]] static void refuse(const Failure& failure) {
    if (failure.cut_off) refuse_cut_off();
    if (failure.other_coding) refuse_unread("a JPEG that is neither baseline nor progressive");
    refuse_damaged(failure.reason);
  }

  jpeg_decompress_struct image_{};
  ErrorManager errors_{};
  jpeg_source_mgr source_{};
  Progress progress_{};
  bool several_scans_ = false;
};

}  // namespace

std::unique_ptr<ImageFile> open_jpeg(Bytes bytes) { return std::make_unique<JpegFile>(bytes); }

}  // namespace mimo
