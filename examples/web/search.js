// Searches precomputed image vectors with a text tower that runs in the browser.
import * as ort from './lib/ort.mjs';
import { Tokenizer } from './lib/tokenizers.mjs';

const SHOWN = 24; // results
const show = (id) => document.getElementById(id);

ort.env.wasm.wasmPaths = new URL('lib/', import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need the headers COOP and COEP, which few hosts of static files send

async function fetched(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path}: ${response.status} ${response.statusText}`);
  return response;
}

const json = async (path) => (await fetched(path)).json();
const bytes = async (path) => (await fetched(path)).arrayBuffer();

/** Numbers of 16 bits (IEEE half precision) as an array of 32 bits. */
export function fromHalf(buffer) {
  return Float32Array.from(new Uint16Array(buffer), (half) => {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 0x1f;
    const fraction = half & 0x3ff;
    return exponent === 0 ? sign * fraction * 2 ** -24 : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

/** The same ids as in Python: start, text, EOT, at most `context_length`. */
function tokenIds(model, text) {
  let ids = model.tokenizer.encode(text).ids;
  // A model with a smaller vocabulary than CLIP's: each of CLIP's tokens is one or more of its own.
  if (model.parts) ids = ids.flatMap((id) => model.parts[id]);
  const limit = model.settings.context_length;
  return ids.length <= limit ? ids : [...ids.slice(0, limit - 1), ids[ids.length - 1]];
}

async function encodeText(model, text) {
  const ids = tokenIds(model, text);
  const tokens = new ort.Tensor('int64', BigInt64Array.from(ids, BigInt), [1, ids.length]);
  const { vectors } = await model.session.run({ tokens });
  return { ids, vector: vectors.data }; // of length 1
}

/** The best images: their vectors have length 1 too, so that a sum of products is the cosine. */
function nearest(library, query, count) {
  const { dim, images, vectors } = library;
  const results = images.map((image, row) => {
    let cosine = 0;
    for (let i = 0; i < dim; i++) cosine += vectors[row * dim + i] * query[i];
    return { ...image, cosine };
  });
  return results.sort((a, b) => b.cosine - a.cosine).slice(0, count);
}

function draw(results) {
  show('results').replaceChildren(...results.map(({ name, thumbnail, cosine }) => {
    const figure = document.createElement('figure');
    const image = Object.assign(new Image(), { src: thumbnail, alt: name, loading: 'lazy' });
    const caption = Object.assign(document.createElement('figcaption'), { textContent: `${cosine.toFixed(3)}  ${name}` });
    figure.append(image, caption);
    return figure;
  }));
}

async function load() {
  const settings = await json('model/preprocess.json');
  const [vocabulary, parts, graph, library, vectors] = await Promise.all([
    json('model/tokenizer.json'), settings.token_parts ? json('model/token_parts.json') : null,
    bytes('model/text.onnx'), json('images.json'), bytes('vectors.f16')]);
  const model = { settings, parts, tokenizer: new Tokenizer(vocabulary, {}), session: await ort.InferenceSession.create(graph) };
  return { model, library: { ...library, vectors: fromHalf(vectors) } };
}

try {
  const { model, library } = await load();
  async function search(text) {
    const start = performance.now();
    const { ids, vector } = await encodeText(model, text);
    const results = nearest(library, vector, SHOWN);
    draw(results);
    show('status').textContent = `${library.images.length} images searched in ${Math.round(performance.now() - start)} ms, on this device`;
    window.result = { text, ids, vector: Array.from(vector), results }; // for tests
  }
  show('form').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = show('query').value.trim();
    if (text) search(text).catch((error) => { show('status').textContent = String(error); });
  });
  Object.assign(show('query'), { disabled: false, placeholder: 'two dogs on a beach' });
  show('query').focus();
  window.ready = true;
} catch (error) {
  show('status').textContent = window.failure = `This page could not be loaded: ${error.message ?? error}`;
}
