package manager_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// asker makes calls for a rank, by one of the paths.
type asker struct {
	quorum func(ctx context.Context, req *fttest.Request) (any, error)
	vote   func(ctx context.Context, rank, step int64, vote bool) (any, error)
	end    func()
}

func askerOf(client *rankclient.Client) asker {
	return asker{
		quorum: func(ctx context.Context, req *fttest.Request) (any, error) {
			client.Trace.Store(new(tracing.ParentOf(ctx)))
			resp, err := client.Quorum(ctx, req)
			return resp.String(), err
		},
		vote: func(ctx context.Context, rank, step int64, vote bool) (any, error) {
			client.Trace.Store(new(tracing.ParentOf(ctx)))
			return fttest.Commits(client.ShouldCommit(ctx, rank, step, vote))
		},
		end: func() { _ = client.Close() },
	}
}

// unaryAsker makes a unary call for each request, and adds an unknown field.
func unaryAsker(c *fttest.Cluster, g *fttest.Group) asker {
	conn, err := rpc.Dial(c.T.Context(), rpc.Dialing{Network: c.Net.Host("g/1")}, "manager",
		g.Server.Address(), time.Second)
	require.NoError(c.T, err)
	stub := torchftpb.NewManagerServiceClient(conn)
	c.T.Cleanup(func() { _ = conn.Close() })
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 5000, protowire.VarintType), 7)
	peer := "manager at " + g.Server.Address()
	return asker{
		quorum: func(ctx context.Context, req *fttest.Request) (any, error) {
			req.Traceparent = tracing.ParentOf(ctx)
			req.ProtoReflect().SetUnknown(unknown)
			resp, err := stub.Quorum(ctx, req)
			return resp.String(), rpc.Wrap("quorum", peer, err)
		},
		vote: func(ctx context.Context, rank, step int64, vote bool) (any, error) {
			message := &torchftpb.ShouldCommitRequest{GroupRank: rank, Step: step, ShouldCommit: vote,
				Traceparent: tracing.ParentOf(ctx)}
			message.ProtoReflect().SetUnknown(unknown)
			resp, err := stub.ShouldCommit(ctx, message)
			return resp.GetShouldCommit(), rpc.Wrap("should_commit", peer, err)
		},
		end: func() { _ = conn.Close() },
	}
}

// ways are the paths by which a rank's request reaches its server.
var ways = map[string]func(c *fttest.Cluster, g *fttest.Group) asker{
	"unary":   unaryAsker,
	"stream":  func(_ *fttest.Cluster, g *fttest.Group) asker { return askerOf(g.Dial("g/1")) },
	"process": func(_ *fttest.Cluster, g *fttest.Group) asker { return askerOf(g.Dial("g")) },
}

// outcome is the result of a call for a rank.
type outcome struct {
	value any
	err   string
	code  codes.Code
	took  time.Duration
	spans []string
}

func TestARequestHasTheSameAnswerOnEachPath(t *testing.T) {
	quorum := func(ctx context.Context, a asker) (any, error) {
		return a.quorum(ctx, &fttest.Request{GroupRank: 1, Step: 5, CommittedQuorumId: -1, ReconfigureHandle: "h",
			CheckpointMetadata: "here"})
	}
	vote := func(ctx context.Context, a asker) (any, error) { return a.vote(ctx, 1, 5, true) }
	const answerTime = time.Second
	for name, test := range map[string]struct {
		call  func(ctx context.Context, a asker) (any, error)
		while func(g *fttest.Group, cancel func()) // a second after the call
		code  codes.Code
		took  time.Duration
	}{
		"a quorum": {quorum, func(g *fttest.Group, _ func()) { g.Quorum(0, 5, time.Minute) },
			codes.OK, answerTime},
		"a quorum, too late": {quorum, nil, codes.DeadlineExceeded, time.Minute - 50*time.Millisecond},
		"a quorum, canceled": {quorum, func(_ *fttest.Group, cancel func()) { cancel() }, codes.Canceled,
			answerTime},
		"a quorum of no rank": {
			func(ctx context.Context, a asker) (any, error) {
				return a.quorum(ctx, &fttest.Request{GroupRank: 2})
			}, nil, codes.InvalidArgument, 0,
		},
		"a quorum at the end of the server": {quorum, func(g *fttest.Group, _ func()) { g.Server.Shutdown() },
			codes.Unavailable, answerTime},
		"a quorum at the end of a sibling": {
			quorum, func(g *fttest.Group, _ func()) {
				g.Vote(0, 4, true, time.Minute)
				synctest.Wait()
				g.Host(0).Kill()
			}, codes.Aborted, answerTime,
		},
		"a quorum and an internal error": {
			quorum, func(g *fttest.Group, _ func()) {
				g.Server.BreakMachine()
				g.Quorum(0, 5, time.Minute)
			}, codes.Internal, answerTime,
		},
		"a vote": {vote, func(g *fttest.Group, _ func()) { g.Vote(0, 5, true, time.Minute) },
			codes.OK, answerTime},
		"a vote, no": {vote, func(g *fttest.Group, _ func()) { g.Vote(0, 5, false, time.Minute) },
			codes.OK, answerTime},
		"a vote, too late": {vote, nil, codes.DeadlineExceeded, time.Minute - 100*time.Millisecond},
		"a vote, canceled": {vote, func(_ *fttest.Group, cancel func()) { cancel() }, codes.Canceled,
			answerTime},
		"a vote of no rank": {
			func(ctx context.Context, a asker) (any, error) { return a.vote(ctx, -1, 5, true) }, nil,
			codes.InvalidArgument, 0,
		},
		"a vote at the end of the server": {vote, func(g *fttest.Group, _ func()) { g.Server.Shutdown() },
			codes.Unavailable, answerTime},
		"a vote of another step": {
			vote, func(g *fttest.Group, _ func()) { g.Vote(0, 6, true, time.Minute) }, codes.Aborted,
			answerTime,
		},
	} {
		for _, traceparent := range []string{"", traceOf(1)} {
			t.Run(fmt.Sprintf("%s, traced %t", name, traceparent != ""), func(t *testing.T) {
				all := map[string]outcome{}
				for way, dial := range ways {
					all[way] = outcomeOf(t, dial, test.call, test.while, traceparent)
				}
				got := all["unary"]
				assert.Equal(t, test.code, got.code, got.err)
				assert.Equal(t, test.took, got.took)
				assert.Equal(t, traceparent != "", len(got.spans) > 0, "%v", got.spans)
				assert.Equal(t, got, all["stream"])
				assert.Equal(t, got, all["process"])
			})
		}
	}
}

func outcomeOf(t *testing.T, dial func(*fttest.Cluster, *fttest.Group) asker,
	call func(context.Context, asker) (any, error),
	while func(*fttest.Group, func()), traceparent string,
) (h outcome) {
	t.Helper()
	spans := tracetest.NewInMemoryExporter()
	defer tracing.Use(sdktrace.NewSimpleSpanProcessor(spans))()
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		g := c.StartGroup("g", 2)
		a := dial(c, g)
		defer a.end()
		ctx, cancel := context.WithTimeout(tracing.Below(t.Context(), traceparent), time.Minute)
		defer cancel()
		answer := fttest.Start(func() (any, error) { return call(ctx, a) })
		time.Sleep(time.Second)
		if while != nil {
			while(g, cancel)
		}
		got := <-answer
		synctest.Wait()
		h = outcome{value: got.Value, took: got.Took, code: status.Code(got.Err)}
		if got.Err != nil {
			h.err = strings.ReplaceAll(got.Err.Error(), g.Server.Address(), "ADDRESS")
		}
		for _, span := range spans.GetSpans() {
			var attributes []string
			for _, attribute := range span.Attributes {
				attributes = append(attributes, fmt.Sprintf("%s=%s", attribute.Key, attribute.Value.String()))
			}
			h.spans = append(h.spans, fmt.Sprint(span.Name, span.Parent.TraceID(), attributes, span.Status,
				span.EndTime.Sub(span.StartTime)))
		}
		slices.Sort(h.spans)
	})
	return h
}

// A server must know how long a rank waits for a quorum. For a vote there is a default.
func TestAQuorumNeedsADeadline(t *testing.T) {
	for way, dial := range ways {
		if way == "stream" {
			continue // the client sets a deadline; TestInvalidRequestsOfASession uses a stream without one
		}
		synctest.Test(t, func(t *testing.T) {
			c := fttest.NewCluster(t, 1)
			g := c.StartGroup("g", 2)
			a := dial(c, g)
			defer a.end()
			_, err := a.quorum(context.Background(), &fttest.Request{GroupRank: 1})
			assert.Equal(t, codes.InvalidArgument, status.Code(err), way)
			assert.ErrorContains(t, err, "the quorum call has no deadline", way)
			g.Vote(0, 5, true, time.Minute)
			commit, err := a.vote(context.Background(), 1, 5, true)
			require.NoError(t, err)
			assert.Equal(t, true, commit)
		})
	}
}
