"""Small files of the form in which well-known data sets are published; all rows are made up."""

import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hostdev.data.preprocess import synthetic

N = 600
RNG = np.random.default_rng(5)


def many(low, high, n=N):
    return RNG.integers(low, high, n).tolist()


def events(low, high, n=N):
    """Return n tuples: a user from 1 to 39, an item from 1 to 59, a rating in [low, high), a time."""
    return list(zip(many(1, 40, n), many(1, 60, n), many(low, high, n), many(10**9, 10**9 + 10**6, n), strict=True))


def write(path, rows, separator=",", header=None, encoding="utf-8"):
    lines = [*([header] if header else []), *(separator.join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding=encoding)


def write_json(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def criteo(folder):
    synthetic.write_text(synthetic.Synthetic(N, 1), folder / "train.txt")
    with tarfile.open(folder / "dac.tar.gz", "w:gz") as archive:
        archive.add(folder / "train.txt", "train.txt")


def avazu(folder):
    rows = [
        (i, int(i % 4 == 0), 14102100 + i // 150, 1005, i % 2, f"{i % 9:08x}", f"{i % 7:08x}", f"{i % 20:08x}", i % 30)
        for i in range(N)
    ]
    write(folder / "train.csv", rows, header="id,click,hour,C1,banner_pos,site_id,app_id,device_id,C14")


def movielens_1m(folder):
    write(folder / "ratings.dat", events(1, 6), "::")
    write(folder / "users.dat", [(i, "FM"[i % 2], 18 + i % 30, i % 20, f"{i:05d}") for i in range(1, 40)], "::")
    movies = [(i, f"Café, the {i} (19{i:02d})", "Drama|War" if i % 2 else "Comedy") for i in range(1, 60)]
    write(folder / "movies.dat", movies, "::", encoding="latin-1")


def movielens_25m(folder):
    rows = [(user, movie, stars / 2, time) for user, movie, stars, time in events(1, 11)]
    write(folder / "ratings.csv", rows, header="userId,movieId,rating,timestamp")
    movies = [(i, f'"One, two {i}"', "Drama|War" if i % 2 else "(no genres listed)") for i in range(1, 60)]
    write(folder / "movies.csv", movies, header="movieId,title,genres")


def book_crossing(folder):
    rows = [(f'"{user}"', f'"{book:09d}X"', f'"{stars}"') for user, book, stars, _ in events(0, 11)]
    header = '"User-ID";"ISBN";"Book-Rating"'
    write(folder / "BX-Book-Ratings.csv", [*rows, ('"7"', '"Ä0001"', '"9"')], ";", header, "latin-1")


def amazon(folder):
    names = ("reviewerID", "asin", "overall", "unixReviewTime", "reviewText")
    rows = [(f"A{user}", f"B{item}", float(stars), time, 'a "good" one') for user, item, stars, time in events(1, 6)]
    write_json(folder / "reviews.json", [dict(zip(names, row, strict=True)) for row in rows])


def yelp(folder):
    names = ("user_id", "business_id", "stars", "date")
    rows = [(f"u{user}", f"b{item}", float(stars), "2015-01-01 10:00:00") for user, item, stars, _ in events(1, 6)]
    write_json(folder / "review.json", [dict(zip(names, row, strict=True)) for row in rows])
    kinds = [None, "Food, Bars", "Bars"]
    places = [{"business_id": f"b{i}", "city": f"city {i % 5}", "categories": kinds[i % 3]} for i in range(60)]
    write_json(folder / "business.json", places)


def mind(folder):
    rows = []
    for i in range(200):
        history = " ".join(f"N{k}" for k in many(1, 40, i % 5))
        shown = " ".join(f"N{k}-{int(k % 3 == 0)}" for k in sorted(set(many(1, 40, 4))))
        rows.append((i, f"U{i % 30}", "11/11/2019 9:05:58 AM", history, shown))
    write(folder / "behaviors.tsv", rows, "\t")
    write(folder / "news.tsv", [(f"N{i}", f"cat{i % 4}", f"sub{i % 9}", f'What "it" is {i}') for i in range(40)], "\t")


def taobao(folder):
    kinds = ["pv", "pv", "pv", "cart", "fav", "buy"]
    rows = [
        (user, item, item % 7, kinds[kind], 1511540000 + (time - 10**9) // 4) for user, item, kind, time in events(0, 6)
    ]
    write(folder / "UserBehavior.csv", rows)


def alimama(folder):
    rows = [
        (user, 494000000 + time, item, "430548_1007", int(kind == 0), int(kind != 0))
        for user, item, kind, time in events(0, 4)
    ]
    write(folder / "raw_sample.csv", rows, header="user,time_stamp,adgroup_id,pid,nonclk,clk")
    ads = [(i, i % 6, i % 11, i % 13, "NULL" if i % 5 == 0 else 1000 + i % 4, 10.5 * i) for i in range(1, 60)]
    write(folder / "ad_feature.csv", ads, header="adgroup_id,cate_id,campaign_id,customer,brand,price")
    users = [(i, 1 + i % 2, i % 6) for i in range(1, 35)]
    write(folder / "user_profile.csv", users, header="userid,final_gender_code,age_level")


def instacart(folder):
    orders = [(i, i % 40, i % 7, i % 24, "" if i < 40 else float(i % 30)) for i in range(300)]
    write(folder / "orders.csv", orders, header="order_id,user_id,order_dow,order_hour_of_day,days_since_prior_order")
    rows = [(i % 300, item, user, again) for i, (user, item, again, _) in enumerate(events(0, 2))]
    write(folder / "order_products.csv", rows, header="order_id,product_id,add_to_cart_order,reordered")


def lastfm(folder):
    rows = [(f"{user:040x}", f"a-{item}", f'The "{item}"', plays) for user, item, plays, _ in events(1, 900)]
    write(folder / "plays.tsv", rows, "\t")


def filmtrust(folder):
    write(folder / "ratings.txt", [(user, item, stars / 2) for user, item, stars, _ in events(1, 9)], " ")


def goodbooks(folder):
    write(folder / "ratings.csv", [row[:3] for row in events(1, 6)], header="user_id,book_id,rating")
    books = [(i, '"Ann Lee, Bo"' if i % 3 else "Ann Lee", "eng" if i % 4 else "", 3 + i / 60) for i in range(1, 60)]
    write(folder / "books.csv", books, header="book_id,authors,language_code,average_rating")


def recbole(folder):
    rows = [
        (user, item, float(label), "drama war" if item % 2 else "fun", float(18 + user % 9))
        for user, item, label, _ in events(0, 2)
    ]
    write(folder / "data.inter", rows, "\t", "user_id:token\titem_id:token\tlabel:float\ttags:token_seq\tage:float")


def fuxictr(folder):
    for name, n in (("train", N), ("valid", 90), ("test", 80)):
        rows = [
            (label, user, item, "^".join(map(str, [*many(1, 60, item % 4), *[0] * (5 - item % 4)])))
            for user, item, label, _ in events(0, 2, n)
        ]
        write(folder / f"{name}.csv", rows, header="clk,userid,adgroup_id,click_sequence")


def sessions(folder):
    lists = pa.array([many(1, 50, i % 6 + 1) for i in range(N)], pa.list_(pa.int64()))
    table = pa.table({"item_id-list": lists, "target": many(1, 50), "bought": many(0, 2)})
    pq.write_table(table, folder / "sessions.parquet")


def census(folder):
    rows = [
        (17 + user, "?" if item % 9 == 0 else "Private", "HS-grad", item, ">50K" if label else "<=50K")
        for user, item, label, _ in events(0, 2)
    ]
    write(folder / "adult.data", rows, ", ")


def libsvm(folder):
    rows = [(f"{2 * (i % 2) - 1:+d}", *(f"{k}:1" for k in sorted(set(many(1, 80, 5))))) for i in range(N)]
    write(folder / "train.svm", rows, " ")


def libffm(folder):
    write(folder / "train.ffm", [(i % 2, f"0:{i % 9}:1", f"1:{i % 31}:1") for i in range(N)], " ")


def slots(folder):
    write(folder / "part-00000", [(f"click:{i % 2}", f"1:{i % 99}", f"2:{i % 7}", f"2:{i % 5}") for i in range(N)], " ")


FILES = {
    "Criteo": criteo,
    "Avazu": avazu,
    "MovieLens 1M": movielens_1m,
    "MovieLens 25M": movielens_25m,
    "Book-Crossing": book_crossing,
    "Amazon reviews": amazon,
    "Yelp": yelp,
    "MIND": mind,
    "Taobao user behaviour": taobao,
    "Alimama display advertising": alimama,
    "Instacart": instacart,
    "Last.fm": lastfm,
    "FilmTrust": filmtrust,
    "goodbooks-10k": goodbooks,
    "RecBole's atomic files": recbole,
    "FuxiCTR": fuxictr,
    "Sessions in Parquet": sessions,
    "Census income": census,
    "LIBSVM": libsvm,
    "libffm": libffm,
    "Slots of an ad log": slots,
}
