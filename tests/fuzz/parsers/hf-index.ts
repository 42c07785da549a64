import { parseWeightMap } from "../../../src/checkpoint/hf/folder.ts";
import { indexLimits, jsonText } from "../../../src/system/json.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const index = {
	metadata: { total_size: 96 },
	weight_map: {
		"backbone.embeddings.weight": "model-00001-of-00002.safetensors",
		"backbone.norm_f.weight": "model-00002-of-00002.safetensors",
	},
};

export default {
	about: "model.safetensors.index.json of a Hugging Face folder",
	open: () => ({
		json: true,
		seeds: [Buffer.from(JSON.stringify(index)), Buffer.from(JSON.stringify(index, null, 2))],
		dictionary: ["../", "/etc/passwd", "\\\\", "\\u0000", '"weight_map":', "."],
		parse: (bytes) => {
			for (const name of parseWeightMap(jsonText(bytes, inputName, indexLimits), inputName).values()) {
				if (/[/\\\0]/.test(name) || name === "..") throw new Error(`${JSON.stringify(name)} leads out of the folder.`);
			}
		},
	}),
} satisfies FuzzParser;
