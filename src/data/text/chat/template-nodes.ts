/** Nodes of a parsed template with what the bounds of a rendering need: what is done with each value, and what nodes cost. */
import { UserError } from "../../../system/errors.ts";
import { PythonFloat } from "../../energon/format/python-text.ts";
import { TextTrie } from "../piece-tokenizer.ts";

/** A node of @huggingface/jinja, by the fields that are read here; which it has depends on its type. */
export interface Node {
	readonly type: string;
	readonly value?: unknown;
	readonly body?: readonly Node[];
	readonly alternate?: readonly Node[];
	readonly defaultBlock?: readonly Node[];
	readonly iterable?: Node;
	readonly lhs?: Node;
	readonly operator?: { readonly value: string };
	readonly left?: Node;
	readonly right?: Node;
	readonly operand?: Node;
	readonly filter?: Node;
	readonly test?: Node;
	readonly callee?: Node;
	readonly args?: readonly Node[];
	readonly argument?: Node;
	readonly object?: Node;
	readonly property?: Node;
	readonly computed?: boolean;
	/** Steps of one evaluation without its parts; absent: `annotate` has not seen the node. */
	steps?: number;
	/** Bits of `Use`. */
	use?: number;
}

/** The use of a node's value. */
export const Use = {
	/** The node makes it. */
	made: 1,
	/** All of its characters, or all of its elements, are looked at. */
	read: 2,
	/** It is written out or compared, with all that is in it. */
	whole: 4,
	/** Methods are looked up in it. */
	object: 8,
	/** The node's work is charged before it runs, by the values of its parts. */
	counted: 16,
	/** It is written out, as Python's str. */
	text: 32,
} as const;

/** Filters whose work or result may be larger than what they are given, and trim, which the interpreter does of None itself. */
const growing = [
	"trim",
	"replace",
	"join",
	"indent",
	"tojson",
	"string",
	"sort",
	"dictsort",
	"unique",
	"selectattr",
	"rejectattr",
];

/** Statements that write what their parts write, or nothing. */
const silent = ["If", "For", "Set", "Macro", "FilterStatement", "Comment", "Break", "Continue"];

/** Whether a node is a slice of a text or list. */
const slices = ({ property }: Node) => property?.type === "SliceExpression";

/** Sets `steps` and `use` of all nodes of a program. */
export function annotate(program: Node): void {
	if (program.steps !== undefined) return;
	// Before its parts, so that the sizes of macros can be summed up from the end, however deep the nodes are.
	const nodes: { readonly node: Node; readonly parent: number; size: number }[] = [
		{ node: program, parent: -1, size: 1 },
	];
	for (let at = 0; at < nodes.length; at++) {
		const { node } = nodes[at]!;
		node.steps = node.type === "CallExpression" || node.type === "CallStatement" ? 8 : 1;
		node.use ??= 0;
		for (const part of partsOf(node)) nodes.push({ node: part, parent: at, size: 1 });
	}
	for (const { node } of nodes) markUses(node);
	for (const { node, parent, size } of nodes.toReversed()) {
		if (parent >= 0) nodes[parent]!.size += size;
		// Its whole body is searched for names each time.
		if (node.type === "Macro" || node.type === "CallStatement") node.steps! += size;
	}
}

function partsOf(node: Node): Node[] {
	const { operator: _, ...parts } = node as Node & Readonly<Record<string, unknown>>;
	return Object.values(parts)
		.flatMap((part) => (part instanceof Map ? [...part].flat() : part))
		.filter((part) => typeof part === "object" && part !== null && "type" in part) as Node[];
}

function markUses(node: Node): void {
	const mark = (use: number, ...parts: readonly (Node | undefined)[]) => {
		for (const part of parts) if (part !== undefined) part.use = (part.use ?? 0) | use;
	};
	for (const block of [node.body, node.alternate, node.defaultBlock]) {
		mark(Use.whole | Use.text, ...(block ?? []).filter(({ type }) => !silent.includes(type)));
	}
	switch (node.type) {
		case "For":
		case "Break":
		case "Continue":
			mark(Use.counted, node);
			break;
		case "FilterStatement":
		case "FilterExpression": {
			const name = String((node.filter!.callee ?? node.filter!).value);
			mark(Use.made, node);
			mark(Use.read | Use.object, node.operand);
			if (node.type === "FilterStatement" || growing.includes(name)) mark(Use.counted, node);
			break;
		}
		case "CallExpression":
			mark(Use.made, node);
			mark(
				Use.read,
				...node.args!.map(
					(part) => part.argument ?? (part.type === "KeywordArgumentExpression" ? (part.value as Node) : part),
				),
			);
			if (node.callee!.type !== "MemberExpression") break;
			mark(Use.counted, node);
			mark(Use.read, node.callee!.object);
			break;
		case "MemberExpression":
			if (slices(node)) mark(Use.made | Use.counted, node);
			mark(slices(node) ? Use.read : Use.object, node.object);
			break;
		case "BinaryExpression":
			if (["+", "~", "in", "not in"].includes(node.operator!.value)) mark(Use.counted, node);
			else if (["==", "!="].includes(node.operator!.value)) mark(Use.whole, node.left, node.right);
			break;
		case "TestExpression":
			if (["lower", "upper"].includes(String(node.test!.value))) mark(Use.read, node.operand);
			break;
	}
}

// Marker characters in a rendered conversation for what its text cannot express: special tokens that are the data's own text,
// places of images, parts in the loss. They are Unicode noncharacters, which no text may contain.

export const marks = {
	/** Around a special token in the data's text, which is not a special token there. One alone only breaks the text. */
	dataBegin: "\ufdd0",
	dataEnd: "\ufdd1",
	/** An image in a turn's text. */
	image: "\ufdd2",
	/** Around what a `{% generation %}` block writes. */
	lossBegin: "\ufdd3",
	lossEnd: "\ufdd4",
	/** Around the content of a turn, where it is looked for. */
	contentBegin: "\ufdd5",
	contentEnd: "\ufdd6",
} as const;

const anyMark = /[\ufdd0-\ufdef]/g;

/** Marks the special tokens in what a sample says. */
export class DataMarks {
	readonly #specials: TextTrie;

	/** `specials`: texts that stand for themselves in data. */
	constructor(specials: readonly string[]) {
		this.#specials = new TextTrie(specials);
	}

	/** A text with its special tokens marked, and broken where it ends in the beginning of one. */
	text(data: string): string {
		const plain = data.replace(anyMark, "\ufffd");
		return this.#marked(plain) + (this.#specials.endsInBeginning(plain) ? marks.dataBegin : "");
	}

	/** A value of a JSON record with all its texts marked, as a template can take it. */
	value(data: unknown): unknown {
		if (typeof data === "string") return this.text(data);
		if (Array.isArray(data)) return data.map((item) => this.value(item));
		if (typeof data !== "object" || data === null || data instanceof PythonFloat) return data;
		return Object.fromEntries(
			Object.entries(data).map(([key, value]) => [this.#marked(key.replace(anyMark, "\ufffd")), this.value(value)]),
		);
	}

	#marked(plain: string): string {
		return this.#specials.replace(plain, (token) => `${marks.dataBegin}${token}${marks.dataEnd}`);
	}
}

/** A text without marks. */
export function withoutMarks(text: string): string {
	return text.replace(anyMark, "");
}

/** Refuses a template that has marks in its own text. */
export function checkNoMarks(text: string, file: string): void {
	if (text.search(anyMark) >= 0)
		throw new UserError(`The chat template ${file} has noncharacters of Unicode (U+FDD0 to U+FDEF).`);
}
