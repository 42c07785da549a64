/** A small subject for the tests of this folder: every layer kind, dynamic resolution, text-only samples. */
import { configurationOf } from "../../../src/config/resolve.ts";
import { type Purpose, type Subject, subjectOf } from "../../../src/parity/verify/subject.ts";

const sizes = {
	preset: "nemotron-vlm-tiny",
	"hybrid-layer-pattern": "ME*-",
	"hidden-size": 32,
	"vocab-size": 128,
	"image-token-id": 127,
	"make-vocab-size-divisible-by": 4,
	"kv-channels": 8,
	"ffn-hidden-size": 48,
	"mamba-num-heads": 4,
	"mamba-head-dim": 16,
	"mamba-state-dim": 8,
	"moe-ffn-hidden-size": 24,
	"moe-shared-expert-intermediate-size": 24,
	"vision-num-layers": 2,
	"vision-hidden-size": 32,
	"global-batch-size": 8,
	"micro-batch-size": 2,
	"adam-eps": 1e-6,
};

export function smallSubject(changes: Readonly<Record<string, unknown>> = {}, purpose: Purpose = "layouts"): Subject {
	return subjectOf(configurationOf({ ...sizes, ...changes }), 2, purpose);
}
