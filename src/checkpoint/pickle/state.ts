/** Sets the states of instances (opcode BUILD). */
import { NumpyArray, NumpyDtype, PythonObject, Tuple } from "./values.ts";

/** Sets the state of an instance. Throws a RangeError for an instance without state, or for an invalid state. */
export function setState(instance: unknown, state: unknown): void {
	if (instance instanceof PythonObject) {
		if (instance.state !== undefined) throw new RangeError(`it sets the state of a ${instance.type} twice`);
		instance.state = state;
	} else if (instance instanceof NumpyDtype) {
		const order = state instanceof Tuple ? state.items[1] : null;
		if (order !== "<" && order !== ">" && order !== "|" && order !== "=") {
			throw new RangeError("a numpy dtype has an invalid state");
		}
		instance.bigEndian = order === ">";
	} else if (instance instanceof NumpyArray) {
		setArray(instance, state);
	} else if (!(instance instanceof Map && state instanceof Map)) {
		// Attributes of an OrderedDict are dropped.
		throw new RangeError("it sets the state of a value that has no state");
	}
}

/** `state`: the argument of numpy.ndarray.__setstate__, (version, shape, dtype, Fortran order, bytes or list of objects). */
function setArray(array: NumpyArray, state: unknown): void {
	const [, shape, dtype, fortran, data] = state instanceof Tuple ? state.items : [];
	if (
		!(shape instanceof Tuple) ||
		!shape.items.every((size) => Number.isSafeInteger(size) && (size as number) >= 0) ||
		!(dtype instanceof NumpyDtype) ||
		!(data instanceof Uint8Array || Array.isArray(data))
	) {
		throw new RangeError("a numpy array has an invalid state");
	}
	array.shape = shape.items as number[];
	array.dtype = dtype;
	array.fortranOrder = fortran === true;
	array.data = data;
}
