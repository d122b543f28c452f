package pyapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/torchft/torchft/go/gossip"
	"github.com/torchft/torchft/go/gossip/agree"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// GossipStart starts a node and connects it to one of its seeds; config is the JSON of gossip.Config. The
// result is a handle for Address and ReleaseStart.
func GossipStart(config string, connectTimeoutUs int64, security string) (op int64, err error) {
	defer ops.Guard(&err)
	protected, err := parseSecurity(security)
	if err != nil {
		return 0, err
	}
	var cfg gossip.Config
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		return 0, fmt.Errorf("config: %w", err)
	}
	cfg.Job, cfg.Security, cfg.ConnectTimeout, cfg.Log = protected.Job, protected.Security,
		micros(connectTimeoutUs), slog.Default()
	if err := cfg.Validate(); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	return ops.Start(cfg.ConnectTimeout+bindTimeout, func(ctx context.Context) (any, error) {
		node, err := gossip.Open(ctx, cfg)
		return node, connectFailed(err)
	}), nil
}

// GossipViewStart waits until the members agree on a view; the result is the JSON of agree.View, and the
// incarnation of this member.
func GossipViewStart(handle, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, node *gossip.Node) (any, error) {
		view, err := node.View(ctx)
		if timeout, ok := errors.AsType[*gossip.TimeoutError](err); ok {
			return nil, ops.As(ops.Timeout, timeout)
		}
		if err != nil {
			return nil, err
		}
		return toJSON(struct {
			*agree.View
			Incarnation int64 `json:"incarnation"`
		}{view, node.ID().Incarnation})
	})
}

// GossipNewsStart waits for news about the view; the result is the JSON of agree.News.
func GossipNewsStart(handle, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, node *gossip.Node) (any, error) {
		news, err := node.News(ctx)
		if err != nil {
			return nil, ops.CallFailed(err)
		}
		return toJSON(news)
	})
}
