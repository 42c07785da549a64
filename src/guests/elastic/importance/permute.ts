/** A checkpoint whose units are sorted by importance: the same function in another order, optimizer state along with its weights. */
import { SelectedStore, type Selection, type SourceCheckpoint, selectTensors } from "../../../checkpoint/index.ts";
import { parentOf } from "../submodel/extract.ts";
import { selectionsOf } from "../submodel/units.ts";
import { type Importance, unitsOfImportance } from "./importance.ts";

/** Owns `source`. `path`: of the ranking, for errors. */
export function permutedSource(source: SourceCheckpoint, importance: Importance, path: string): SourceCheckpoint {
	const { configuration } = parentOf(source);
	const model = selectTensors(source.weights, (name) => !name.startsWith("optimizer."));
	const selections = selectionsOf(model, configuration, unitsOfImportance(configuration, importance, path));
	const targets = new Map([...selections].map(([name, selection]) => [selection.source, { name, selection }]));
	const all = new Map<string, Selection>(selections);
	for (const name of source.weights.tensors.keys()) {
		const [state, parameter] = /^(optimizer\.state\.[^.]+\.)(.+)$/.exec(name)?.slice(1) ?? [];
		if (state === undefined) continue;
		const target = targets.get(parameter!);
		all.set(state + (target?.name ?? parameter), {
			...(target?.selection ?? { rows: null, columns: null }),
			source: name,
		});
	}
	const weights = new SelectedStore(source.weights, all);
	return { ...source, weights, [Symbol.dispose]: () => source[Symbol.dispose]() };
}
