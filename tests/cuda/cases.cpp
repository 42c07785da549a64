#include "cases.h"

namespace check {

Cases cases(bool large) {
  Cases all;
  add_elementwise(all, large);
  add_products(all, large);
  add_norms(all, large);
  add_loss(all, large);
  add_experts(all, large);
  add_grouped_mlp(all, large);
  add_attention(all, large);
  add_mamba(all, large);
  add_elastic(all, large);
  return all;
}

}  // namespace check
