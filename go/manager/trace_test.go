package manager_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/torchftpb"
)

// traceOf returns the traceparent that a rank sends.
func traceOf(rank int) string {
	return []string{"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"00-1bf7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"}[rank]
}

func TestATraceGoesFromTheRanksToTheLighthouse(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	defer tracing.Use(sdktrace.NewSimpleSpanProcessor(spans))()
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 2), c.StartGroup("b", 2)
		ask := func(g *fttest.Group, rank int, traceparent string) <-chan fttest.Answer[*fttest.Result] {
			return g.QuorumBelow(traceparent, &fttest.Request{GroupRank: int64(rank), Step: 7},
				time.Minute)
		}
		first := ask(a, 0, traceOf(0))
		time.Sleep(time.Second)
		all := answers{first, ask(a, 1, traceOf(1))}
		time.Sleep(time.Second)
		all = append(all, ask(b, 0, ""), ask(b, 1, "")) // group b sends no traceparent
		id := all.results(t)[0].GetQuorumId()
		synctest.Wait()

		found := map[string]tracetest.SpanStub{}
		for _, span := range spans.GetSpans() {
			name := span.Name
			for _, a := range span.Attributes {
				switch a.Key {
				case "torchft.step":
					assert.EqualValues(t, 7, a.Value.AsInt64())
				case "torchft.group_rank":
					name += a.Value.String()
				case "torchft.quorum_id":
					assert.Equal(t, id, a.Value.AsInt64())
				}
			}
			found[name] = span
		}
		require.Len(t, found, 4, "%v", found)
		second, request, answer := found["manager.quorum1"], found["manager.ask_lighthouse"],
			found["lighthouse.quorum"]
		assert.Equal(t, "b7ad6b7169203331", found["manager.quorum0"].Parent.SpanID().String())
		assert.Equal(t, "c7ad6b7169203331", second.Parent.SpanID().String())
		assert.Equal(t, second.SpanContext.SpanID(), request.Parent.SpanID(),
			"the request belongs to the trace of the rank that asked last")
		assert.Equal(t, request.SpanContext.SpanID(), answer.Parent.SpanID())
		assert.Equal(t, second.SpanContext.TraceID(), answer.SpanContext.TraceID())
		assert.Equal(t, 2*time.Second,
			found["manager.quorum0"].EndTime.Sub(found["manager.quorum0"].StartTime))
		assert.Equal(t, time.Second, answer.EndTime.Sub(answer.StartTime))
	})
}

func TestATraceOfACanceledWait(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	defer tracing.Use(sdktrace.NewSimpleSpanProcessor(spans))()
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a := c.StartGroup("a", 1)
		require.Error(t, (<-a.QuorumBelow(traceOf(0), &fttest.Request{}, time.Second)).Err)
		a.Server.Shutdown()
		synctest.Wait()
		found := spans.GetSpans()
		require.Len(t, found, 3)
		for _, span := range found {
			assert.Equal(t, "Error", span.Status.Code.String(), span.Name)
		}
	})
}

// byName returns the spans by their name, followed by the value of the attribute distinct if they have it.
func byName(
	t *testing.T, spans *tracetest.InMemoryExporter, distinct attribute.Key,
) map[string]tracetest.SpanStub {
	t.Helper()
	found := map[string]tracetest.SpanStub{}
	for _, span := range spans.GetSpans() {
		name := span.Name
		if value, ok := attributesOf(span)[distinct]; ok {
			name += value.String()
		}
		require.NotContains(t, found, name)
		found[name] = span
	}
	return found
}

func attributesOf(span tracetest.SpanStub) map[attribute.Key]attribute.Value {
	found := map[attribute.Key]attribute.Value{}
	for _, a := range span.Attributes {
		found[a.Key] = a.Value
	}
	return found
}

func TestTheVotesOfAStepAreInItsTrace(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	defer tracing.Use(sdktrace.NewSimpleSpanProcessor(spans))()
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 3)
		conn, err := rpc.Dial(t.Context(), rpc.Dialing{Network: c.Net.Host("a/2")}, "manager",
			a.Server.Address(), time.Second)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		// Rank 0 votes in the server's process, rank 1 on its session, and rank 2 by a unary call like
		// upstream clients.
		votes := []func(ctx context.Context) (bool, error){
			func(ctx context.Context) (bool, error) {
				client := a.Dial("a")
				client.Trace.Store(new(tracing.ParentOf(ctx)))
				return fttest.Commits(client.ShouldCommit(ctx, 0, 7, true))
			},
			func(ctx context.Context) (bool, error) {
				a.Ranks[1].Trace.Store(new(tracing.ParentOf(ctx)))
				return fttest.Commits(a.Ranks[1].ShouldCommit(ctx, 1, 7, true))
			},
			func(ctx context.Context) (bool, error) {
				resp, err := torchftpb.NewManagerServiceClient(conn).ShouldCommit(ctx,
					&torchftpb.ShouldCommitRequest{GroupRank: 2, Step: 7})
				return resp.GetShouldCommit(), err
			},
		}
		var answers []<-chan fttest.Answer[bool]
		for rank, vote := range votes {
			answers = append(answers, fttest.Start(func() (bool, error) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				return vote(tracing.Below(ctx, traceOf(rank%2)))
			}))
			time.Sleep(time.Second)
		}
		for _, answer := range answers {
			got := <-answer
			require.NoError(t, got.Err)
			assert.False(t, got.Value, "rank 2 voted no")
		}
		synctest.Wait()
		found := byName(t, spans, "torchft.group_rank")
		require.Len(t, found, 3, "%v", found)
		for rank := range votes {
			span := found[fmt.Sprint("manager.should_commit", rank)]
			assert.Equal(t, []string{"b7ad6b7169203331", "c7ad6b7169203331"}[rank%2],
				span.Parent.SpanID().String())
			attributes := attributesOf(span)
			assert.EqualValues(t, 7, attributes["torchft.step"].AsInt64())
			assert.Equal(t, "a", attributes["torchft.replica_id"].AsString())
			assert.Equal(t, rank != 2, attributes["torchft.vote"].AsBool())
			require.Contains(t, attributes, attribute.Key("torchft.committed"))
			assert.False(t, attributes["torchft.committed"].AsBool())
			assert.Equal(t, time.Duration(2-rank)*time.Second, span.EndTime.Sub(span.StartTime),
				"the span of a vote ends when the last rank has voted")
		}
	})
}

func TestSpansOfACanceledVoteAndOfARankWithoutTrace(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	defer tracing.Use(sdktrace.NewSimpleSpanProcessor(spans))()
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 2)
		require.Error(t, (<-a.Vote(0, 7, true, time.Second)).Err)
		synctest.Wait()
		require.Empty(t, spans.GetSpans())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		a.Ranks[0].Trace.Store(new(traceOf(0)))
		_, err := a.Ranks[0].ShouldCommit(ctx, 0, 7, true)
		require.Error(t, err)
		synctest.Wait()
		found := spans.GetSpans()
		require.Len(t, found, 1)
		assert.Equal(t, "Error", found[0].Status.Code.String())
		assert.NotContains(t, attributesOf(found[0]), attribute.Key("torchft.committed"),
			"the vote was canceled before all ranks had voted")
	})
}
