/** Energon's sample types and their fields (docs/spec/energon.md §1.6). */

export interface SampleType {
	readonly name: string;
	/** Required fields. */
	readonly required: readonly string[];
	readonly optional: readonly string[];
}

const type = (name: string, required: string[], optional: string[] = []): SampleType => ({ name, required, optional });

const ocrFields = ["blocks", "lines", "words", "chars"].flatMap((level) => [
	`${level === "blocks" ? "block" : level}_boxes`,
	`${level === "blocks" ? "block" : level}_text`,
]);

const types: readonly SampleType[] = [
	type("CaptioningSample", ["image", "caption"]),
	type("ImageSample", ["image"]),
	type("ImageClassificationSample", ["image"], ["label", "label_name"]),
	type("InterleavedSample", ["sequence"]),
	type("MultiChoiceVQASample", ["image", "context"], ["choices", "correct_choice_idx"]),
	type("OCRSample", ["image", "text"], [...ocrFields, "block_classes"]),
	type(
		"SimilarityInterleavedSample",
		["images", "texts"],
		["audio", "video", "similarity_matrix", "matched_text_indices"],
	),
	type("TextSample", ["text"]),
	type("VidQASample", ["video", "context"], ["answers", "answer_weights"]),
	type("VQASample", ["image", "context"], ["answers", "answer_weights"]),
	type("VQAOCRSample", ["image", "context", "text"], ["answers", "answer_weights", "words_boxes", "words_text"]),
];

const byName = new Map(types.map((sampleType) => [sampleType.name, sampleType]));

/** The type with a name such as "CaptioningSample"; undefined if Energon lacks it. */
export function sampleTypeOf(name: string): SampleType | undefined {
	return byName.get(name);
}

/** Names of all types, for messages and prompts. */
export const sampleTypeNames: readonly string[] = [...byName.keys()];

/** The sample type of a deprecated `__class__` such as "CaptioningWebdataset". */
export function sampleTypeOfClass(name: string): SampleType | undefined {
	return name.endsWith("Webdataset") ? byName.get(name.replace(/Webdataset$/, "Sample")) : undefined;
}
