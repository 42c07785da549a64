/** The kinds of layers by their names in patterns (config/hybrid-pattern.ts). */
import type { LayerKind } from "../../../config/hybrid-pattern.ts";
import { attention } from "./attention.ts";
import { gdn } from "./gdn.ts";
import type { Kind } from "./kind.ts";
import { latentAttention } from "./latent-attention.ts";
import { mamba } from "./mamba.ts";
import { mlp } from "./mlp.ts";
import { moe } from "./moe.ts";

export const kinds: Readonly<Record<LayerKind, Kind>> = { mamba, gdn, attention, latentAttention, mlp, moe };
