/** Names of the presets, apart from their values so that the schema need not import them. */
export const presetNames = [
	"nemotron-tiny",
	"nemotron-vlm-tiny",
	"nemotron-20l",
	"nemotron-54l",
	"nemotron-nano-30b-a3b",
] as const;
export type PresetName = (typeof presetNames)[number];
