// The key a visitor typed, for this tab only, and requests that carry it.

const KEY = "deft-key";

export const savedKey = () => sessionStorage.getItem(KEY) ?? "";

export function saveKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function authorised(options = {}) {
  const key = savedKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return { ...options, headers };
}

// The server's answer as an object, or an Error that says what the server said.
export async function ask(url, options = {}) {
  const response = await fetch(url, authorised(options));
  const told = await response.json().catch(() => ({}));
  if (!response.ok) {
    const error = new Error(told.detail || told.title || `${response.status} ${response.statusText}`);
    error.status = response.status;
    throw error;
  }
  return told;
}
