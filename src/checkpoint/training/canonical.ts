/** A native checkpoint as a run reads it: its tensors as if no conversion had given them another layout. */
import { fromLayout } from "../conversion/layouts.ts";
import type { NativeCheckpoint } from "../native/reader.ts";
import type { TensorStore } from "../store.ts";

/** Disposing it disposes the checkpoint. */
export type CanonicalCheckpoint = TensorStore & Pick<NativeCheckpoint, "manifest" | "readObject">;

/**
 * Experts one by one, gated rows in halves, layers numbered one by one (docs/spec/checkpoint.md §5); the optimizer's tensors
 * alike. Throws a UserError where tensors do not make the layout that the index says.
 */
export function canonicalCheckpoint(checkpoint: NativeCheckpoint): CanonicalCheckpoint {
	const { manifest, path } = checkpoint;
	const store = fromLayout(checkpoint, { ...manifest.layout, gluTensorParallel: 1 }, path);
	if (store === checkpoint) return checkpoint;
	return {
		path,
		tensors: store.tensors,
		originsOf: (name) => store.originsOf?.(name) ?? [],
		readInto: (name, offset, into) => store.readInto(name, offset, into),
		manifest,
		readObject: (name) => checkpoint.readObject(name),
		[Symbol.dispose]: () => checkpoint[Symbol.dispose](),
	};
}
