/** The model of a Hugging Face NemotronH folder, with the few things its class does differently. */
import { type HuggingFaceModel, parsePythonJson } from "../../checkpoint/index.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { describedConfig } from "../../models/language/from-configuration.ts";
import type { Precision } from "../bf16.ts";

/**
 * Expert bias fixed, no balancing loss; group scores from the best two experts, norms with one ε, and Δ at
 * least time_step_min (whatever use_mamba_kernels says: transformers 5 ignores it).
 */
export function huggingFaceConfig(
	{ configuration, configText }: HuggingFaceModel,
	path: string,
	precision: Precision,
): HybridConfig {
	const json = parsePythonJson(configText, path);
	const timeStepMinimum = Number(json.time_step_min ?? 0.001);
	const config = describedConfig(configuration, { bf16: precision === "bf16" });
	return {
		...config,
		mamba: { ...config.mamba, gatedNormEpsilon: config.normEpsilon, timeStepMinimum },
		moe: { ...config.moe, groupScoreTopk: 2 },
	};
}
