import { layersByBlock } from "../../../src/checkpoint/conversion/layouts.ts";
import { parseHybridPattern } from "../../../src/config/hybrid-pattern.ts";
import { UserError } from "../../../src/system/errors.ts";
import { type FuzzParser, inputName } from "../parser.ts";

export default {
	about: "a hybrid layer pattern, flat and in groups",
	open: () => ({
		seeds: ["M*E-", "MEME*M-ME"].map((text) => Buffer.from(text)),
		dictionary: ["[", "]", "|", "/", "M", "*", "E", "-", "[*-]", "[ME]"],
		parse: (bytes) => {
			const pattern = new TextDecoder().decode(bytes);
			layersByBlock(pattern, inputName);
			parseHybridPattern(pattern);
		},
		refuses: (error) => error instanceof UserError,
	}),
} satisfies FuzzParser;
