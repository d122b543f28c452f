package gossip

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"slices"

	"github.com/hashicorp/memberlist"

	"github.com/torchft/torchft/go/internal/auth"
)

// keyring encrypts with a key derived from the first of the job's tokens, and decrypts with the keys of all
// tokens. It is nil if the job has no tokens.
type keyring struct {
	*memberlist.Keyring
	tokens *auth.Watched[auth.Tokens]
	now    auth.Tokens
}

func newKeyring(tokens *auth.Watched[auth.Tokens]) (*keyring, error) {
	if tokens == nil {
		return nil, nil
	}
	k := &keyring{Keyring: &memberlist.Keyring{}, tokens: tokens}
	return k, k.refresh()
}

// refresh updates the ring after a change of the tokens. Only one goroutine may call it.
func (k *keyring) refresh() error {
	if k == nil {
		return nil
	}
	tokens := k.tokens.Get()
	if slices.Equal(tokens, k.now) {
		return nil
	}
	var keys [][]byte
	for i, token := range tokens {
		if slices.Contains(tokens[:i], token) {
			continue
		}
		key, err := hkdf.Key(sha256.New, []byte(token), nil, "torchft gossip 1", 32)
		if err != nil {
			return err
		}
		if err := k.AddKey(key); err != nil {
			return err
		}
		keys = append(keys, key)
	}
	// UseKey moves a key to the front of the ring. Called for the last key first, it puts the keys in the
	// order of the tokens, before the keys to be removed. This order matters for the removal: memberlist
	// removes a key in place unless it is the last one, and the ring may be read meanwhile.
	if !inOrder(k.GetKeys(), keys) {
		for _, key := range slices.Backward(keys) {
			if err := k.UseKey(key); err != nil {
				return err
			}
		}
	}
	for ring := k.GetKeys(); len(ring) > len(keys); ring = k.GetKeys() {
		if err := k.RemoveKey(ring[len(ring)-1]); err != nil {
			return err
		}
	}
	k.now = tokens
	return nil
}

// inOrder reports whether a ring begins with these keys.
func inOrder(ring, keys [][]byte) bool {
	return len(ring) >= len(keys) && slices.EqualFunc(ring[:len(keys)], keys, bytes.Equal)
}
