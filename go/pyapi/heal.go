package pyapi

import (
	"context"
	"time"

	"github.com/torchft/torchft/go/heal"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// endTimeout bounds the wait for closed streams, which end at once.
const endTimeout = time.Minute

// HealServerStart starts a server of memory for healing groups; the result is a handle.
func HealServerStart(pieceTimeoutUs, bytesPerSecond int64, inBackground bool) (op int64, err error) {
	defer ops.Guard(&err)
	return ops.Start(bindTimeout, func(context.Context) (any, error) {
		server, err := heal.Listen(micros(pieceTimeoutUs), bytesPerSecond, inBackground)
		if err != nil {
			return nil, err
		}
		return server, nil
	}), nil
}

// HealPort returns the port on which a server listens.
func HealPort(server int64) (port int64, err error) {
	return with(server, func(s *heal.Server) (int64, error) { return s.Port(), nil })
}

// HealOffer offers registered memory (csrc/memory.c), in blocks of a size of its own. Returns a handle.
func HealOffer(memory int64) (offer int64, err error) {
	return with(memory, func(m *heal.Memory) (int64, error) {
		o, err := heal.NewOffer(m, 0)
		return instead(memory, o, err)
	})
}

// instead returns a handle of an object that has taken over another one.
func instead(of int64, object any, err error) (handle int64, _ error) {
	if err != nil {
		return 0, ops.As(ops.Value, err)
	}
	ops.Remove(of)
	return ops.Put(object), nil
}

// HealBlockSize returns the size of an offer's blocks in bytes.
func HealBlockSize(offer int64) (bytes int64, err error) {
	return with(offer, func(o *heal.Offer) (int64, error) { return o.BlockSize(), nil })
}

// HealCopied announces a copy of a region of an offer: its address, and how many of its bytes are complete.
func HealCopied(offer, region, address, ready int64) (done bool, err error) {
	return with(offer, func(o *heal.Offer) (bool, error) { return true, o.Copied(region, address, ready) })
}

// HealCopyFailed announces that copying an offer has failed, with the reason.
func HealCopyFailed(offer int64, reason string) (done bool, err error) {
	return with(offer, func(o *heal.Offer) (bool, error) {
		o.CopyFailed(reason)
		return true, nil
	})
}

// HealRevokeStart takes the memory of an offer back, except for copies; the result is false if the memory is
// still in use after the timeout.
func HealRevokeStart(offer, graceUs, timeoutUs int64) (op int64, err error) {
	timeout := micros(timeoutUs)
	return start(offer, timeout+endTimeout, func(_ context.Context, o *heal.Offer) (any, error) {
		return o.Revoke(micros(graceUs), timeout), nil
	})
}

// HealOfferEndStart takes back an offer's memory; the result is false if the timeout finds it in use.
func HealOfferEndStart(offer int64) (op int64, err error) {
	return start(offer, 2*endTimeout, func(_ context.Context, o *heal.Offer) (any, error) {
		ended := o.End(endTimeout)
		if ended {
			ops.Remove(offer)
		}
		return ended, nil
	})
}

// HealGrant lets one target read an offer; the result is a handle.
func HealGrant(server, offer int64) (grant int64, err error) {
	return with(server, func(s *heal.Server) (int64, error) {
		return with(offer, func(o *heal.Offer) (int64, error) { return ops.Put(s.Grant(o)), nil })
	})
}

// HealSecret returns the secret that a target sends to use a grant.
func HealSecret(grant int64) (secret string, err error) {
	return with(grant, func(g *heal.Grant) (string, error) { return g.Secret(), nil })
}

// HealServed returns how many bytes were sent to a target.
func HealServed(grant int64) (bytes int64, err error) {
	return with(grant, func(g *heal.Grant) (int64, error) { return g.Served(), nil })
}

// HealFetch prepares a transfer into registered memory; the result is a handle. Memory on a device is filled
// through stages of `window` blocks.
func HealFetch(
	memory, blockSize, streams int64, checked bool, stallUs, window int64,
) (fetch int64, err error) {
	return with(memory, func(m *heal.Memory) (int64, error) {
		f, err := heal.NewFetch(m, heal.Settings{
			BlockSize: blockSize, Streams: int(streams), Unchecked: !checked, StallAfter: micros(stallUs),
			Window: window,
		})
		return instead(memory, f, err)
	})
}

// HealStage provides a stage for the next window of a transfer; a stage must have room for a whole window.
// The result is the window's number, -1 if none is left.
func HealStage(fetch, address, length int64) (window int64, err error) {
	return with(fetch, func(f *heal.Fetch) (int64, error) { return f.Stage(address, length) })
}

// HealAdd adds a source to a transfer.
func HealAdd(fetch int64, address, secret string, assigned bool) (done bool, err error) {
	return with(fetch, func(f *heal.Fetch) (bool, error) {
		role := heal.Additional
		if assigned {
			role = heal.Assigned
		}
		return true, f.Add(address, secret, role)
	})
}

// HealWaitStart waits for progress of a transfer (heal.Fetch.Wait), or for the timeout; the result is the
// JSON of heal.Status.
func HealWaitStart(fetch, timeoutUs int64) (op int64, err error) {
	return start(fetch, micros(timeoutUs), func(ctx context.Context, f *heal.Fetch) (any, error) {
		return toJSON(f.Wait(ctx))
	})
}

// HealFetchEndStart ends a transfer: when the operation has ended, no thread writes to the memory.
func HealFetchEndStart(fetch int64) (op int64, err error) {
	return start(fetch, 2*endTimeout, func(_ context.Context, f *heal.Fetch) (any, error) {
		f.Close()
		ops.Remove(fetch)
		return true, nil
	})
}
