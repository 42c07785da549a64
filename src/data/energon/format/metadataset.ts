/**
 * Reads metadatasets: YAML files that blend, join, subset and nest datasets (docs/spec/energon.md §1.7). Both versions of the
 * format become the same tree, which flatten.ts flattens.
 */
import { UserError } from "../../../system/errors.ts";
import { unprepared } from "../errors.ts";
import type { Subflavors } from "../sample.ts";
import type { Subset } from "../sharder.ts";
import { folderOf, resolvePath, type Storage } from "../storage/storage.ts";
import { type AuxReference, parseAux } from "./file-store.ts";
import { mcoreSplits } from "./indexed.ts";
import { toPlain, YamlFields, type YamlValue } from "./python-text.ts";
import { datasetKind, readMap } from "./webdataset.ts";

/** Treatment of a sample that a joined dataset lacks. */
export type NonMatch = "error" | "skip" | "none";

interface Reference {
	readonly path: string;
	readonly splitPart: string | null;
	readonly subflavors: Subflavors;
	readonly shuffleOverEpochsMultiplier: number | null;
	readonly datasetConfig: string | null;
	readonly splitConfig: string | null;
	readonly subset: Subset | null;
	readonly aux: ReadonlyMap<string, AuxReference>;
}

export interface JoinPart {
	/** Name of the joiner's argument; null if the joined datasets are a list. */
	readonly name: string | null;
	readonly path: string;
	readonly splitPart: string | null;
	readonly subflavors: Subflavors;
	readonly datasetConfig: string | null;
	readonly splitConfig: string | null;
	readonly nonMatch: NonMatch;
	readonly aux: ReadonlyMap<string, AuxReference>;
}

export interface Join {
	readonly parts: readonly JoinPart[];
	/** Type of the joined samples. */
	readonly joiner: string;
	readonly splitPart: string | null;
	readonly subflavors: Subflavors;
	readonly subset: Subset | null;
	/** The metadataset file, beside which the join index is. */
	readonly file: string;
}

export type Node =
	| { readonly kind: "reference"; readonly reference: Reference; readonly nested: Metadataset | null }
	| { readonly kind: "join"; readonly join: Join }
	| {
			readonly kind: "blend";
			readonly items: readonly { node: Node; weight: number }[];
			readonly subset: Subset | null;
	  }
	| {
			readonly kind: "blend_epochized";
			readonly items: readonly { node: Node; repetitions: number }[];
			readonly subset: Subset | null;
	  };

export interface Metadataset {
	readonly path: string;
	readonly splits: ReadonlyMap<string, Node>;
}

/** Most metadataset files that a metadataset may name, directly or indirectly. */
const MOST_FILES = 10_000;

/** Reads a metadataset file and all files that it names. Throws a UserError for unknown keys, paths and classes. */
export function readMetadataset(storage: Storage, path: string): Metadataset {
	return readFile(storage, path, [], new Map());
}

/** `files`: metadatasets by path; a file that is named several times is read once. */
function readFile(
	storage: Storage,
	path: string,
	parents: readonly string[],
	files: Map<string, Metadataset>,
): Metadataset {
	if (parents.includes(path)) throw new UserError(`The metadataset ${path} contains itself.`);
	const known = files.get(path);
	if (known !== undefined) return known;
	if (files.size + parents.length >= MOST_FILES) {
		throw new UserError(`The metadataset ${parents[0] ?? path} names more than ${MOST_FILES} metadataset files.`);
	}
	const fields = YamlFields.of(readMap(storage, path), path);
	fields.get("__module__");
	const version = fields.optionalString("__class__") ?? "Metadataset";
	if (version === "McoreBlend") {
		const metadataset = mcoreBlend(storage, path, fields);
		files.set(path, metadataset);
		return metadataset;
	}
	if (version !== "Metadataset" && version !== "MetadatasetV2") {
		throw new UserError(`${path} has the class ${version}; a metadataset is Metadataset or MetadatasetV2.`);
	}
	const splits = fields.optionalMap("splits");
	if (splits === null) throw new UserError(`${path} has no splits.`);
	fields.end();
	const reader = new NodeReader(storage, path, version, [...parents, path], files);
	const metadataset: Metadataset = {
		path,
		splits: new Map([...splits].map(([part, value]) => [part, reader.split(value, `split ${part} of ${path}`)])),
	};
	files.set(path, metadataset);
	return metadataset;
}

/** A blend of Megatron's indexed text. */
function mcoreBlend(storage: Storage, path: string, fields: YamlFields): Metadataset {
	const file = resolvePath(folderOf(path), fields.string("mcore_json"));
	fields.end();
	const splits = [...mcoreSplits(file, storage.readText(file))].map(([part, entries]): [string, Node] => {
		const items = entries.map(({ path: text, weight }) => {
			const where = `${part} in ${file}`;
			if (datasetKind(storage, text) !== "indexed") throw new UserError(`${where}: there is no ${text} with its .idx.`);
			const own = YamlFields.of(new Map([["weight", weight]]), where);
			return { weight: readShare(own, "weight", where), node: referenceTo(text) };
		});
		return [part, { kind: "blend", items, subset: null }];
	});
	if (splits.length === 0) throw new UserError(`${file} has none of the splits train, valid and test.`);
	return { path, splits: new Map(splits) };
}

function referenceTo(path: string): Node {
	const none = { splitPart: null, datasetConfig: null, splitConfig: null, subset: null };
	const reference = { ...none, path, subflavors: {}, shuffleOverEpochsMultiplier: 1, aux: new Map() };
	return { kind: "reference", reference, nested: null };
}

/** Reads a weight or number of repetitions: above 0, and representable as a 32-bit float. */
function readShare(fields: YamlFields, name: "weight" | "repetitions", where: string): number {
	const share = fields.optionalNumber(name) ?? 1;
	const inDraws = Math.fround(share);
	if (inDraws > 0 && Number.isFinite(inDraws) && (name === "weight" || share <= MOST_REPETITIONS)) return share;
	const most = name === "weight" ? "" : ` and at most ${MOST_REPETITIONS}`;
	throw new UserError(`${name} of ${where} is ${share}; allowed are numbers above 0${most}.`);
}

/** Most repetitions, for which sample counts stay exact. */
const MOST_REPETITIONS = 1e9;

class NodeReader {
	constructor(
		private readonly storage: Storage,
		private readonly file: string,
		private readonly version: "Metadataset" | "MetadatasetV2",
		private readonly parents: readonly string[],
		private readonly files: Map<string, Metadataset>,
	) {}

	split(value: YamlValue, where: string): Node {
		const fields = YamlFields.of(value, where);
		if (this.version === "Metadataset") {
			if (!fields.has("datasets") && ["blend", "blend_epochized", "join", "path"].some((name) => fields.has(name))) {
				throw new UserError(
					`${where} has keys of a MetadatasetV2, so the file has to begin with the lines "__module__: megatron.energon" and "__class__: MetadatasetV2".`,
				);
			}
			const items = fields.list("datasets").map((item, i) => this.#weighted(item, `dataset ${i + 1} in ${where}`));
			fields.end();
			return { kind: "blend", items, subset: null };
		}
		if (fields.has("blend")) {
			const items = fields.list("blend").map((item, i) => this.#weighted(item, `blend entry ${i + 1} in ${where}`));
			const subset = readSubset(fields, where);
			fields.end();
			return { kind: "blend", items, subset };
		}
		if (fields.has("blend_epochized")) {
			const items = fields.list("blend_epochized").map((item, i) => {
				const place = `blend_epochized entry ${i + 1} in ${where}`;
				const inner = YamlFields.of(item, place);
				const repetitions = readShare(inner, "repetitions", place);
				return { repetitions, node: this.#leaf(inner, place) };
			});
			const subset = readSubset(fields, where);
			fields.end();
			return { kind: "blend_epochized", items, subset };
		}
		return this.#leaf(fields, where);
	}

	#weighted(item: YamlValue, where: string): { node: Node; weight: number } {
		const fields = YamlFields.of(item, where);
		const weight = readShare(fields, "weight", where);
		return { weight, node: this.#leaf(fields, where) };
	}

	#leaf(fields: YamlFields, where: string): Node {
		if (fields.has("join")) return { kind: "join", join: this.#join(fields, where) };
		const reference = this.#reference(fields, where);
		fields.end();
		const kind = datasetKind(this.storage, reference.path);
		if (kind === "metadataset") {
			if (reference.datasetConfig !== null || reference.splitConfig !== null || reference.aux.size > 0) {
				throw new UserError(`${where} names a metadataset, which takes no dataset_config, split_config or aux.`);
			}
			const nested = readFile(this.storage, reference.path, this.parents, this.files);
			return { kind: "reference", reference, nested };
		}
		if (kind === "webdataset" || kind === "jsonl" || kind === "indexed")
			return { kind: "reference", reference, nested: null };
		if (kind === "filesystem") throw new UserError(`${where} names ${reference.path}, a folder that is only for aux.`);
		throw new UserError(`${where} names data that cannot be read: ${unprepared(reference.path).message}`);
	}

	#reference(fields: YamlFields, where: string): Reference {
		const aux = new Map(
			[...(fields.optionalMap("aux") ?? [])].map(([name, value]) => {
				if (typeof value !== "string") throw new UserError(`aux ${name} in ${where} is not a path.`);
				return [name, parseAux(value, folderOf(this.file), `aux ${name} in ${where}`)];
			}),
		);
		return {
			path: resolvePath(folderOf(this.file), fields.string("path")),
			splitPart: fields.optionalString("split_part"),
			subflavors: this.#subflavors(fields),
			shuffleOverEpochsMultiplier: readMultiplier(fields),
			datasetConfig: fields.optionalString("dataset_config"),
			splitConfig: fields.optionalString("split_config"),
			subset: this.version === "Metadataset" ? null : readSubset(fields, where),
			aux,
		};
	}

	#subflavors(fields: YamlFields): Subflavors {
		const subflavors = toPlain(fields.optionalMap("subflavors") ?? new Map()) as Subflavors;
		const legacy = this.version === "Metadataset" ? fields.optionalString("subflavor") : null;
		return legacy === null ? subflavors : { ...subflavors, __subflavor__: legacy };
	}

	#join(fields: YamlFields, where: string): Join {
		const value = fields.get("join");
		const named: [string | null, YamlValue][] = Array.isArray(value)
			? value.map((item) => [null, item])
			: value instanceof Map
				? [...value]
				: [];
		if (named.length === 0) throw fields.wrong("join", "a list or map of datasets");
		const parts = named.map(([name, item], i): JoinPart => {
			const place = `joined dataset ${name ?? i + 1} in ${where}`;
			const inner = YamlFields.of(item, place);
			const nonMatch = inner.optionalString("nonmatch") ?? "error";
			if (nonMatch !== "error" && nonMatch !== "skip" && nonMatch !== "none") {
				throw new UserError(`nonmatch of ${place} is ${nonMatch}; it is error, skip or none.`);
			}
			const reference = this.#reference(inner, place);
			inner.end();
			if (datasetKind(this.storage, reference.path) !== "webdataset") {
				throw new UserError(`The ${place} is ${reference.path}, which is not a prepared WebDataset.`);
			}
			return { name, nonMatch, ...reference };
		});
		if (parts[0]!.nonMatch !== "error")
			throw new UserError(`The first joined dataset in ${where} cannot have nonmatch.`);
		const joiner = YamlFields.of(fields.get("joiner"), `joiner in ${where}`);
		joiner.get("__module__");
		const type = joiner.string("__class__");
		joiner.end();
		const join: Join = {
			parts,
			joiner: type,
			splitPart: fields.optionalString("split_part"),
			subflavors: this.#subflavors(fields),
			subset: readSubset(fields, where),
			file: this.file,
		};
		readMultiplier(fields);
		fields.end();
		return join;
	}
}

function readMultiplier(fields: YamlFields): number | null {
	return fields.has("shuffle_over_epochs_multiplier") ? fields.optionalNumber("shuffle_over_epochs_multiplier") : 1;
}

function readSubset(fields: YamlFields, where: string): Subset | null {
	const map = fields.optionalMap("subset");
	if (map === null) return null;
	const inner = new YamlFields(map, `subset in ${where}`);
	const range = inner.list("range");
	inner.end();
	if (range.length !== 2)
		throw new UserError(`subset in ${where} has ${range.length} bounds; it has a start and an end.`);
	const [start, end] = range as [YamlValue, YamlValue];
	const isEnd = typeof end === "string" && end.trim() === "end";
	if (Number.isInteger(start) && (Number.isInteger(end) || isEnd)) {
		return { absoluteRange: [start as number, isEnd ? null : (end as number)], range: [0, 1] };
	}
	const fraction = (value: YamlValue): number => {
		const percent = typeof value === "string" ? /^\s*([0-9.eE+-]+)%$/.exec(value) : null;
		const number = percent ? Number(percent[1]) : Number.NaN;
		if (!(number >= 0 && number <= 100)) {
			throw new UserError(`subset in ${where}: ${JSON.stringify(value)} is neither a sample number nor 0% to 100%.`);
		}
		return number / 100;
	};
	const bounds = [fraction(start), fraction(end)] as const;
	if (bounds[0] > bounds[1]) throw new UserError(`subset in ${where} ends before it starts.`);
	return { absoluteRange: null, range: bounds };
}
