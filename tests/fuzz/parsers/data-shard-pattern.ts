import { collapseBraces, expandBraces } from "../../../src/data/energon/format/webdataset.ts";
import { UserError } from "../../../src/system/errors.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: "shard patterns, expanded and collapsed again",
	open: () => ({
		seeds: ["s-{000..012}.tar", "{a,b{c,d}}-{1..9..3}", "{z..A}\\{x\\}", "{{1..3},{x}}"].map((text) =>
			Buffer.from(text),
		),
		dictionary: ["{0..9}", "{0..99999999999999999999}", "{,}", "..", "{-5..5}", "\\"],
		parse: (bytes) => {
			const names = expandBraces(new TextDecoder().decode(bytes));
			if (names.length < 1000) collapseBraces(names);
		},
		refuses: (error) => error instanceof UserError && error.message.startsWith("The shard pattern "),
	}),
} satisfies FuzzParser;
