/** NemotronH: one block a layer, Mamba-2, attention without positions, dense MLPs or experts with relu². */
import { configurationFromNemotronH, configurationToNemotronH, missingKeys } from "../configuration.ts";
import { addNemotronH, detectNemotronH, requireCounts, spellings } from "../language-names.ts";
import type { Family } from "./family.ts";

export const nemotronH: Family = {
	modelType: "nemotron_h",
	title: "NemotronH",
	embedding: "embeddings.weight",
	blocks: 1,
	read: configurationFromNemotronH,
	missing: missingKeys,
	describes: ({ squaredRelu }) => squaredRelu,
	write: configurationToNemotronH,
	detect: detectNemotronH,
	spelling: spellings.published,
	requireCounts,
	addNames: addNemotronH,
};
